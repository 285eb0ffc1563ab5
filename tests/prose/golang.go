package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"strconv"
	"strings"
)

// goTexts returns the comments of a Go file and the strings that people read. In
// production code these are all strings that look like sentences. In tests and their
// tools they are those of messages.
func goTexts(name string, src []byte) ([]text, error) {
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, name, src, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	if ast.IsGenerated(file) {
		return nil, nil
	}
	var texts []text
	for _, group := range file.Comments {
		texts = append(texts, commentTexts(fset.Position(group.Pos()).Line, group)...)
	}
	testing := strings.HasSuffix(name, "_test.go") || strings.HasPrefix(name, "tests/")
	seen := make(map[token.Pos]bool)
	add := func(n ast.Node) bool {
		if lit, ok := n.(*ast.BasicLit); ok && !seen[n.Pos()] {
			seen[n.Pos()] = true
			if s, ok := prose(lit); ok {
				texts = append(texts, text{fset.Position(n.Pos()).Line, s})
			}
		}
		return true
	}
	if !testing {
		ast.Inspect(file, add)
		return texts, nil
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok && isMessage(call) {
			for _, arg := range call.Args {
				ast.Inspect(arg, add)
			}
		}
		return true
	})
	return texts, nil
}

// messages are the functions and methods whose strings people read.
var messages = map[string]bool{
	"Debug": true, "Info": true, "Warn": true, "Error": true, "Check": true, "New": true,
	"Errorf": true, "Fatal": true, "Fatalf": true, "Log": true, "Logf": true, "Skip": true, "Skipf": true,
}

func isMessage(call *ast.CallExpr) bool {
	switch f := call.Fun.(type) {
	case *ast.SelectorExpr:
		return messages[f.Sel.Name]
	case *ast.Ident:
		return messages[f.Name]
	}
	return false
}

var someWords = regexp.MustCompile(`[\pL\d,;:"')%]+ \(?[\pL\d]+ `)

// prose returns a literal's string if it looks like a sentence.
func prose(lit *ast.BasicLit) (string, bool) {
	if lit.Kind != token.STRING {
		return "", false
	}
	s, err := strconv.Unquote(lit.Value)
	return s, err == nil && someWords.MatchString(s) && !strings.ContainsAny(s, "{}<>\n")
}

var directive = regexp.MustCompile(`^//[a-z]+:|^//nolint|^// Code generated`)

// commentTexts returns the paragraphs and list items of a comment. It skips indented
// lines outside items, which are code, and directives.
func commentTexts(line int, group *ast.CommentGroup) []text {
	var p paragraphs
	inItem := false
	for _, c := range group.List {
		body, _, _ := strings.Cut(c.Text, "//nolint")
		if directive.MatchString(c.Text) {
			body = ""
		}
		body = strings.TrimSuffix(strings.TrimPrefix(strings.TrimPrefix(body, "//"), "/*"), "*/")
		for s := range strings.SplitSeq(body, "\n") {
			s = strings.TrimPrefix(s, " ")
			switch isItem := listItem.MatchString(s); {
			case isItem || strings.TrimSpace(s) == "":
				inItem = isItem
			case (s[0] == '\t' || s[0] == ' ') && !inItem:
				s = ""
			}
			p.take(line, s)
			line++
		}
	}
	p.end()
	return p.texts
}
