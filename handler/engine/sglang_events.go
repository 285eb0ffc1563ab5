package engine

import "github.com/tidwall/gjson"

// readSGLangEvents reads the member kv_events of /server_info.
func readSGLangEvents(info gjson.Result, to *KVEvents) {
	e := info.Get("kv_events")
	port := within(count(e.Get("endpoint_port_base")), maxPort)
	if !e.IsObject() || port == 0 || e.Get("publisher").Str != "zmq" {
		return
	}
	to.Endpoint = "tcp://" + joinHostPort(endpointIn(e.Get("endpoint_host")), port)
	if port := within(count(e.Get("replay_endpoint_port_base")), maxPort); port > 0 {
		host := endpointIn(e.Get("replay_endpoint_host"))
		if host == "" {
			host = "*"
		}
		to.Replay = "tcp://" + joinHostPort(host, port)
	}
	to.Topic = endpointIn(e.Get("topic"))
	to.Publishers = max(1, within(count(e.Get("dp_size")), maxRanks))
}
