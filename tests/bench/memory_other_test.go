//go:build !linux

package main

import "errors"

func holdMemory(int) error { return errors.ErrUnsupported }
