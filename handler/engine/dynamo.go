package engine

// isDynamo tells whether the server is a Dynamo frontend, which lists the
// instances that it knows with its health. It is a router itself: it tells no
// capacity, and which of its workers and ranks computes what is its own choice.
func (s *server) isDynamo() bool {
	_, body := s.ask("/health") // 503 while there are none
	health := readObject(body)
	return health.Get("instances").IsArray() && health.Get("endpoints").IsArray()
}
