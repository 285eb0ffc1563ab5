package kvscore

import (
	"encoding/binary"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// TextBlock returns the hash of a block of text, with the kind of the text in its low
// bits. The kinds show how the tokens of a prompt are spread over its blocks.
func TextBlock(hash uint64, block []byte) uint64 {
	return hash&^cache.KindMask | uint64(kindOf(block))
}

// kindOf returns the kind of a text, from two samples of eight bytes. Tokenizers begin a
// token at most bytes that are not letters. They use several tokens for a letter outside
// ASCII. A kind combines 8 levels of the former with 4 of the latter.
func kindOf(block []byte) (kind uint8) {
	if len(block) < 16 {
		return 0
	}
	second := len(block) >> 1
	foreign, letters := sample(binary.LittleEndian.Uint64(block), binary.LittleEndian.Uint64(block[second:]))
	return foreignLevel[foreign]<<3 | otherLevel[16-foreign-letters]
}

// sample counts the bytes of two words that are not ASCII, and those that are
// letters.
func sample(a, b uint64) (foreign, letters uint64) {
	const ones = 0x0101010101010101
	f := a>>7&ones + b>>7&ones
	l := letter(a)>>7&ones + letter(b)>>7&ones
	return f * ones >> 56, l * ones >> 56
}

// letter sets the highest bit of each byte that is an ASCII letter.
func letter(w uint64) uint64 {
	const ones = 0x0101010101010101
	low := (w | 0x20*ones) &^ (0x80 * ones) // in lower case
	return (low + 0x1F*ones) &^ (low + 0x05*ones) &^ w
}

// The levels of kindOf, by the number of bytes in the sample.
var otherLevel, foreignLevel = levels(1, 2, 3, 4, 6, 8, 10), levels(2, 6, 11)

func levels(from ...int) (of [17]uint8) {
	for n := range of {
		for _, least := range from {
			if n >= least {
				of[n]++
			}
		}
	}
	return of
}
