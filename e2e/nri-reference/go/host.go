package main

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
)

// command is one line of input. Times are in milliseconds; 0 means none.
type command struct {
	ID uint64 `json:"id"`
	// One of start, stop, timeout, list, plugins, run, stop_pod, remove, create.
	Op string `json:"op"`

	// start
	Socket              string `json:"socket"`
	Name                string `json:"name"`
	Version             string `json:"version"`
	RegistrationTimeout int64  `json:"registration_timeout"`
	// start, timeout
	RequestTimeout int64 `json:"request_timeout"`
	// start, list: what Synchronize tells from now on; and so many more pods of one container each, each with so many bytes of annotations.
	Pods     []pod `json:"pods"`
	Generate int   `json:"generate"`
	Padding  int   `json:"padding"`

	// run, stop_pod, remove, create
	Pod       pod       `json:"pod"`
	Container container `json:"container"`
	// The runtime's own limit, and when it gives the request up.
	Deadline int64 `json:"deadline"`
	Cancel   int64 `json:"cancel"`
}

// answer is one line of output.
type answer struct {
	ID    uint64 `json:"id"`
	Error string `json:"error,omitempty"`
	// Microseconds that a request took.
	Elapsed int64 `json:"elapsed"`
	// plugins: "index-name" of each that is connected, in the order of the requests.
	Plugins []string `json:"plugins"`
	// create: what all plugins together want; a hook is its path and arguments, a device its path.
	Hooks   []string `json:"hooks"`
	Devices []string `json:"devices"`
}

// host is the runtime: at most one adaptation at a time.
type host struct {
	sync.Mutex
	nri *adaptation.Adaptation
	// The newest start or list. Apart, since a start asks for it.
	listed atomic.Pointer[command]
}

func (h *host) do(c *command) answer {
	var (
		a   answer
		err error
	)
	start := time.Now()
	switch c.Op {
	case "start":
		err = h.start(c)
	case "stop":
		h.stop()
	case "timeout":
		adaptation.SetPluginRequestTimeout(milliseconds(c.RequestTimeout))
	case "list":
		h.listed.Store(c)
	case "plugins":
		a.Plugins, err = h.plugins()
	default:
		err = h.relay(c, &a)
	}
	a.Elapsed = time.Since(start).Microseconds()
	if err != nil {
		a.Error = err.Error()
	}
	return a
}

func (h *host) start(c *command) error {
	h.Lock()
	defer h.Unlock()
	if h.nri != nil {
		return errors.New("started already")
	}
	adaptation.SetPluginRegistrationTimeout(milliseconds(c.RegistrationTimeout))
	adaptation.SetPluginRequestTimeout(milliseconds(c.RequestTimeout))
	h.listed.Store(c)
	synchronize := func(ctx context.Context, plugin adaptation.SyncCB) error {
		pods, containers := objects(h.listed.Load())
		_, err := plugin(ctx, pods, containers)
		return err
	}
	update := func(context.Context, []*adaptation.ContainerUpdate) ([]*adaptation.ContainerUpdate, error) {
		return nil, errors.New("this runtime has nothing to update")
	}
	// Plugins of the machine are none of ours.
	nowhere := c.Socket + ".none"
	nri, err := adaptation.New(c.Name, c.Version, synchronize, update, adaptation.WithSocketPath(c.Socket),
		adaptation.WithPluginPath(nowhere), adaptation.WithPluginConfigPath(nowhere))
	if err != nil {
		return err
	}
	if err := nri.Start(); err != nil {
		return err
	}
	h.nri = nri
	return nil
}

func (h *host) stop() {
	h.Lock()
	defer h.Unlock()
	if h.nri != nil {
		h.nri.Stop()
	}
	h.nri = nil
}

func (h *host) running() (*adaptation.Adaptation, error) {
	h.Lock()
	defer h.Unlock()
	if h.nri == nil {
		return nil, errors.New("not started")
	}
	return h.nri, nil
}

// relay sends a request to the plugins the way runtimes do: while no plugin is being synchronised.
func (h *host) relay(c *command, a *answer) error {
	nri, err := h.running()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if c.Deadline > 0 {
		ctx, cancel = context.WithTimeout(ctx, milliseconds(c.Deadline))
		defer cancel()
	}
	if c.Cancel > 0 {
		defer time.AfterFunc(milliseconds(c.Cancel), cancel).Stop()
	}
	defer nri.BlockPluginSync().Unblock()
	if c.Op == "create" {
		return create(ctx, nri, c, a)
	}
	return podEvent(ctx, nri, c.Op, c.Pod.sandbox())
}

func create(ctx context.Context, nri *adaptation.Adaptation, c *command, a *answer) error {
	made, err := nri.CreateContainer(ctx, &adaptation.CreateContainerRequest{
		Pod:       c.Pod.sandbox(),
		Container: c.Container.of(c.Pod.ID),
	})
	if err != nil {
		return err
	}
	adjust := made.GetAdjust()
	for _, hook := range adjust.GetHooks().GetCreateRuntime() {
		a.Hooks = append(a.Hooks, strings.Join(append([]string{hook.Path}, hook.Args...), " "))
	}
	for _, device := range adjust.GetLinux().GetDevices() {
		a.Devices = append(a.Devices, device.Path)
	}
	return nil
}

// plugins looks into the adaptation, which tells nobody whom it would ask: the list may have one whose connection has been closed.
func (h *host) plugins() ([]string, error) {
	nri, err := h.running()
	if err != nil {
		return nil, err
	}
	nri.Lock()
	defer nri.Unlock()
	names := []string{}
	list := reflect.ValueOf(nri).Elem().FieldByName("plugins")
	for i := range list.Len() {
		plugin := list.Index(i).Elem()
		if !plugin.FieldByName("closed").Bool() {
			names = append(names, plugin.FieldByName("idx").String()+"-"+plugin.FieldByName("base").String())
		}
	}
	return names, nil
}

func milliseconds(n int64) time.Duration {
	return time.Duration(n) * time.Millisecond
}
