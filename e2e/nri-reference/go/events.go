//go:build !nri08

package main

import (
	"context"
	"fmt"

	"github.com/containerd/nri/pkg/adaptation"
)

func podEvent(ctx context.Context, nri *adaptation.Adaptation, op string, pod *adaptation.PodSandbox) error {
	switch op {
	case "run":
		return nri.RunPodSandbox(ctx, &adaptation.RunPodSandboxRequest{Pod: pod})
	case "stop_pod":
		return nri.StopPodSandbox(ctx, &adaptation.StopPodSandboxRequest{Pod: pod})
	case "remove":
		return nri.RemovePodSandbox(ctx, &adaptation.RemovePodSandboxRequest{Pod: pod})
	}
	return fmt.Errorf("no command %q", op)
}
