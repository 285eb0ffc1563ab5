package engine

// toOther knows no engine, but OpenAI's API: what every server with it has.
func (f *fit) toOther() {
	f.cacheSalt()
}
