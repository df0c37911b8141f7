package main

import (
	"fmt"
	"strings"

	"github.com/containerd/nri/pkg/adaptation"
)

// pod is a pod sandbox; one without a path of a network namespace is on the host's network.
type pod struct {
	ID        string `json:"id"`
	UID       string `json:"uid"`
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
	Netns     string `json:"netns"`
}

func (p *pod) sandbox() *adaptation.PodSandbox {
	namespaces := []*adaptation.LinuxNamespace{{Type: "pid"}, {Type: "ipc"}, {Type: "mount"}}
	if p.Netns != "" {
		namespaces = append(namespaces, &adaptation.LinuxNamespace{Type: "network", Path: p.Netns})
	}
	return &adaptation.PodSandbox{
		Id:        p.ID,
		Uid:       p.UID,
		Name:      p.Name,
		Namespace: p.Namespace,
		Linux:     &adaptation.LinuxPodSandbox{Namespaces: namespaces},
	}
}

// container is a container of a pod.
type container struct {
	ID   string   `json:"id"`
	Name string   `json:"name"`
	Env  []string `json:"env"`
}

func (c *container) of(pod string) *adaptation.Container {
	return &adaptation.Container{Id: c.ID, PodSandboxId: pod, Name: c.Name, Env: c.Env}
}

// objects makes what Synchronize tells.
func objects(c *command) (pods []*adaptation.PodSandbox, containers []*adaptation.Container) {
	for i := range c.Pods {
		pods = append(pods, c.Pods[i].sandbox())
	}
	padding := map[string]string{"padding": strings.Repeat("x", c.Padding)}
	for i := range c.Generate {
		id := fmt.Sprintf("g%05d", i)
		made := pod{ID: id, UID: "foreign-" + id, Name: "pod-" + id, Namespace: "default", Netns: "/run/netns/" + id}
		sandbox := made.sandbox()
		sandbox.Annotations = padding
		pods = append(pods, sandbox)
		running := (&container{ID: "c-" + id, Name: "main"}).of(id)
		running.State = adaptation.ContainerState_CONTAINER_RUNNING
		containers = append(containers, running)
	}
	return pods, containers
}
