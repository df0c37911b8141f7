// Command nri-runtime is the reference runtime side of NRI under remote control: the adaptation package that containerd and CRI-O
// embed, driven by one JSON command a line on stdin, answered by one JSON line each on stdout. It ends with its input.
//
// Commands run side by side; an answer carries the id of its command.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"sync"
)

// maxLine bounds a command: none is near it.
const maxLine = 1 << 20

func main() {
	var (
		host    host
		writing sync.Mutex
		out     = json.NewEncoder(os.Stdout)
		lines   = bufio.NewScanner(os.Stdin)
	)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		var c command
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			fmt.Fprintf(os.Stderr, "nri-runtime: no command: %v\n", err)
			os.Exit(2)
		}
		go func() {
			a := host.do(&c)
			a.ID = c.ID
			writing.Lock()
			defer writing.Unlock()
			if err := out.Encode(a); err != nil {
				os.Exit(1)
			}
		}()
	}
}
