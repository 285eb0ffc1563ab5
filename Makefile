.PHONY: build test check image up

build: # a Caddy with the module in it
	go build -o caddy ./cmd/caddy

test: # the quick tests
	go test -short ./... ./tests/...

check: # all that must hold of a commit
	.ci/run

image: # the container image kv_router
	docker build --tag kv_router --target router --file handler/operations/Dockerfile .

up: # router, two simulated engines, Prometheus, Grafana, a little load
	docker compose up --build
