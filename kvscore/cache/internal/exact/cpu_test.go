package exact

import (
	"syscall"
	"time"
)

// threadCPU returns the time that the current thread has run. Benchmarks report it because
// other processes share the machine. The caller must have locked the thread.
func threadCPU() time.Duration { return usage(1) } // RUSAGE_THREAD

// processCPU includes the garbage collector.
func processCPU() time.Duration { return usage(syscall.RUSAGE_SELF) }

func usage(who int) time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(who, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
