// Command pause is process 1 of each pod's sandbox, and of the real node itself: it does nothing, which holds the
// namespaces open, and it buries the children that others leave behind. SIGTERM and SIGINT end it.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGCHLD, syscall.SIGTERM, syscall.SIGINT)
	for received := range signals {
		if received != syscall.SIGCHLD {
			return
		}
		bury()
	}
}

// bury collects every child that has ended: signals that arrive together are delivered once.
func bury() {
	for {
		pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if pid <= 0 || err != nil {
			return
		}
	}
}
