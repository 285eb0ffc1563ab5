// Package texts estimates how many tokens a text has, by its bytes and by what engines have counted in
// other texts. It does not tokenize.
package texts

import (
	"encoding/binary"
	"math/bits"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// Block returns the hash of a block of text, with the kind of the text in its low
// bits. The kinds show how the tokens of a prompt are spread over its blocks.
func Block(hash uint64, kind uint8) uint64 { return hash&^cache.KindMask | uint64(kind) }

// Kind returns the kind of a text, from two samples of eight bytes; 0 for less than 16
// bytes. Tokenizers begin a token at most bytes that are not letters. They use several tokens
// for a letter outside ASCII. A kind combines 8 levels of the former with 4 of the latter.
func Kind(block []byte) uint8 {
	if len(block) < 16 {
		return 0
	}
	a, b := binary.LittleEndian.Uint64(block), binary.LittleEndian.Uint64(block[len(block)>>1:])
	// Bytes of one sample use the bits between those of the other.
	external := bits.OnesCount64(a&highs>>1 | b&highs)
	letters := bits.OnesCount64(letters(a)>>1 | letters(b))
	return kindTable[(external<<5|letters)&(len(kindTable)-1)]
}

const (
	ones  = 0x0101010101010101
	highs = 0x80 * ones
)

// letters sets the highest bit of each byte that is an ASCII letter, and no other bits.
func letters(w uint64) uint64 {
	low := (w | 0x20*ones) &^ highs // in lower case
	return (low + 0x1F*ones) &^ (low + 0x05*ones) &^ w & highs
}

// kindTable has the kinds by the number of external bytes and letters in the samples.
var kindTable = func() (of [1024]uint8) {
	level := func(n int, from ...int) (level uint8) {
		for _, least := range from {
			if n >= least {
				level++
			}
		}
		return level
	}
	for external := range 17 {
		for letters := range 17 - external {
			of[external<<5|letters] = level(external, 2, 6, 11)<<3 | level(16-external-letters, 1, 2, 3, 4, 6, 8, 10)
		}
	}
	return of
}()
