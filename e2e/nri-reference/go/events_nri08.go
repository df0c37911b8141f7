//go:build nri08

package main

import (
	"context"
	"fmt"

	"github.com/containerd/nri/pkg/adaptation"
)

// Up to NRI 0.11 all pod events are of one kind.
func podEvent(ctx context.Context, nri *adaptation.Adaptation, op string, pod *adaptation.PodSandbox) error {
	event := &adaptation.StateChangeEvent{Pod: pod}
	switch op {
	case "run":
		return nri.RunPodSandbox(ctx, event)
	case "stop_pod":
		return nri.StopPodSandbox(ctx, event)
	case "remove":
		return nri.RemovePodSandbox(ctx, event)
	}
	return fmt.Errorf("no command %q", op)
}
