// Package manual checks the manual (README.md and docs) against the code. Each block
// fenced as caddyfile is valid. Each option, JSON field, metric, log line, condition,
// error code and placeholder of the code is documented, and the other way round. Links
// lead somewhere, alerts have runbooks, and pages have their lengths.
//
// The checks find names in the manual by the form of a page:
//
//   - a block fenced as caddy-syntax in docs/configuration.md has all options, and a list
//     item that begins with the name in bold type describes each;
//   - tables have a column "JSON" (docs/configuration.md), "metric" and "labels",
//     "placeholder" (docs/observability.md), "code" (docs/apis.md), "log line",
//     "condition", or "reason" for fallbacks (docs/troubleshooting.md).
package manual
