package observe

import (
	"cmp"
	"runtime/debug"
	"slices"
	"sync"
)

const module = "github.com/caddy-kvrouter/kvrouter"

// release is the version of a build without a repository, such as that of an image. The linker sets it.
var release string

// Version returns the version of this module, as the build has recorded it. It is that of a tag, a pseudo-version
// with a commit, or (devel).
var Version = sync.OnceValue(func() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || release != "" {
		return cmp.Or(release, "unknown")
	}
	if i := slices.IndexFunc(info.Deps, func(m *debug.Module) bool { return m.Path == module }); i >= 0 {
		return info.Deps[i].Version
	}
	return info.Main.Version
})
