module dranic.dev/e2e/containerd

go 1.26.6

// nri: what containerd 2.4.2 asks for itself. build.sh lifts it to 0.12.5 in a copy, for the build that has the failure policy.
require (
	github.com/containerd/containerd/v2 v2.4.2
	github.com/containerd/nri v0.12.3
)
