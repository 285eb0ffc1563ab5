package main

import "syscall"

// holdMemory writes to so many bytes of memory of its own and gives them back.
func holdMemory(n int) error {
	b, err := syscall.Mmap(-1, 0, n, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		return err
	}
	for i := 0; i < n; i += 4096 {
		b[i] = 1
	}
	return syscall.Munmap(b)
}
