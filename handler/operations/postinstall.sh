#!/bin/sh
# Makes the user of caddy.service. The package starts nothing: the engines are not set yet.
set -e
getent passwd caddy >/dev/null ||
	useradd --system --user-group --home-dir /var/lib/caddy --shell /usr/sbin/nologin caddy
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload
fi
