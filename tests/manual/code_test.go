package manual

import (
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// code is the syntax of the module's packages, without tests.
type code struct {
	packages map[string]*goPackage // by folder
}

type goPackage struct {
	files []*ast.File
	// values are the expressions that a name has in any place of the package.
	values map[string][]ast.Expr
	funcs  map[string][]*ast.FuncDecl
}

// readCode parses all packages below the folders.
func readCode(files fs.FS, folders ...string) (*code, error) {
	c := &code{packages: make(map[string]*goPackage)}
	for _, folder := range folders {
		err := fs.WalkDir(files, folder, func(name string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
				return err
			}
			src, err := fs.ReadFile(files, name)
			if err != nil {
				return err
			}
			file, err := parser.ParseFile(token.NewFileSet(), name, src, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			dir := path.Dir(name)
			if c.packages[dir] == nil {
				c.packages[dir] = &goPackage{values: make(map[string][]ast.Expr), funcs: make(map[string][]*ast.FuncDecl)}
			}
			c.packages[dir].add(file)
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return c, nil
}

func (p *goPackage) add(file *ast.File) {
	p.files = append(p.files, file)
	set := func(name ast.Expr, value ast.Expr) {
		if id, ok := name.(*ast.Ident); ok {
			p.values[id.Name] = append(p.values[id.Name], value)
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ValueSpec:
			for i, name := range n.Names {
				if i < len(n.Values) {
					set(name, n.Values[i])
				}
			}
		case *ast.AssignStmt:
			if len(n.Lhs) == len(n.Rhs) {
				for i, name := range n.Lhs {
					set(name, n.Rhs[i])
				}
			}
		case *ast.FuncDecl:
			p.funcs[n.Name.Name] = append(p.funcs[n.Name.Name], n)
		}
		return true
	})
}

// anything stands in a text for what only a running program knows.
const anything = "\x00"

var formatVerb = regexp.MustCompile(`%[-+# 0]*[\d.]*[a-zA-Z]`)

// texts returns the strings that an expression may have.
func (p *goPackage) texts(e ast.Expr, depth int) []string {
	if depth > 4 {
		return []string{anything}
	}
	switch e := e.(type) {
	case *ast.BasicLit:
		if e.Kind == token.STRING {
			return []string{constant.StringVal(constant.MakeFromLiteral(e.Value, e.Kind, 0))}
		}
	case *ast.ParenExpr:
		return p.texts(e.X, depth)
	case *ast.BinaryExpr:
		var all []string
		for _, x := range p.texts(e.X, depth+1) {
			for _, y := range p.texts(e.Y, depth+1) {
				all = append(all, x+y)
			}
		}
		return all
	case *ast.Ident:
		return p.textsOf(e.Name, depth)
	case *ast.CallExpr:
		f, ok := e.Fun.(*ast.SelectorExpr)
		switch {
		case !ok:
		case f.Sel.Name == "Error" && len(e.Args) == 0: // of an error that is known by name
			return p.texts(f.X, depth+1)
		case (f.Sel.Name == "New" || f.Sel.Name == "Errorf" || f.Sel.Name == "Sprintf") && len(e.Args) > 0:
			all := p.texts(e.Args[0], depth+1)
			for i, s := range all {
				all[i] = formatVerb.ReplaceAllString(s, anything)
			}
			return all
		}
	}
	return []string{anything}
}

// textsOf returns the strings that a name may have, which are those of its values.
func (p *goPackage) textsOf(name string, depth int) []string {
	var all []string
	for _, value := range p.values[name] {
		all = append(all, p.texts(value, depth+1)...)
	}
	if len(all) == 0 {
		return []string{anything}
	}
	return all
}

func calledName(call *ast.CallExpr) string {
	switch f := call.Fun.(type) {
	case *ast.Ident:
		return f.Name
	case *ast.SelectorExpr:
		return f.Sel.Name
	}
	return ""
}

// calls visits each call in the package.
func (p *goPackage) calls(f func(call *ast.CallExpr, within *ast.FuncDecl)) {
	for _, file := range p.files {
		for _, decl := range file.Decls {
			within, _ := decl.(*ast.FuncDecl)
			ast.Inspect(decl, func(n ast.Node) bool {
				if call, ok := n.(*ast.CallExpr); ok {
					f(call, within)
				}
				return true
			})
		}
	}
}

// messages are the log messages at level warn and error, and the conditions. anything
// stands for their variable parts.
func (c *code) messages() (lines, conditions []string) {
	for _, p := range c.packages {
		p.calls(func(call *ast.CallExpr, within *ast.FuncDecl) {
			if _, isMethod := call.Fun.(*ast.SelectorExpr); !isMethod {
				return
			}
			switch name := calledName(call); {
			case (name == "Warn" || name == "Error") && len(call.Args) > 0 && !logsConditions(within):
				lines = append(lines, p.texts(call.Args[0], 0)...)
			case name == "Check" && len(call.Args) == 2 && warns(call.Args[0]):
				lines = append(lines, p.texts(call.Args[1], 0)...)
			case name == "Raise" && len(call.Args) > 1:
				conditions = append(conditions, p.texts(call.Args[1], 0)...)
			}
		})
	}
	unknown := func(s string) bool { return strings.Trim(s, anything) == "" }
	lines = slices.DeleteFunc(slices.Compact(slices.Sorted(slices.Values(lines))), unknown) // of caddyhttp.Error and others
	return lines, slices.DeleteFunc(slices.Compact(slices.Sorted(slices.Values(conditions))), unknown)
}

// logsConditions returns whether a function logs conditions, whose names are its argument.
func logsConditions(f *ast.FuncDecl) bool {
	return f != nil && (f.Name.Name == "Raise" || f.Name.Name == "Replace")
}

// warns returns whether an expression is the level warn or error.
func warns(level ast.Expr) bool {
	s, ok := level.(*ast.SelectorExpr)
	return ok && (s.Sel.Name == "WarnLevel" || s.Sel.Name == "ErrorLevel")
}

// constants returns the values of a package's string constants whose names match.
func (c *code) constants(folder string, name *regexp.Regexp) (values []string) {
	p := c.packages[folder]
	if p == nil {
		return nil
	}
	for id, all := range p.values {
		if !name.MatchString(id) {
			continue
		}
		for _, value := range all {
			values = append(values, p.texts(value, 0)...)
		}
	}
	slices.Sort(values)
	return slices.DeleteFunc(slices.Compact(values), func(s string) bool { return s == anything })
}

// placeholders returns the names below http.kv_router that the function placeholder knows.
func (c *code) placeholders() (names []string) {
	for _, p := range c.packages {
		for _, f := range p.files { // of the facts of an attempt
			ast.Inspect(f, func(n ast.Node) bool {
				if kv, ok := n.(*ast.KeyValueExpr); ok {
					key, _ := kv.Key.(*ast.Ident)
					if lit, ok := kv.Value.(*ast.BasicLit); ok && key != nil && key.Name == "placeholder" {
						name, _ := strconv.Unquote(lit.Value)
						names = append(names, name)
					}
				}
				return true
			})
		}
		for _, f := range p.funcs["placeholder"] {
			ast.Inspect(f, func(n ast.Node) bool {
				if clause, ok := n.(*ast.CaseClause); ok {
					for _, e := range clause.List {
						if eq, ok := e.(*ast.BinaryExpr); ok {
							e = eq.Y
						}
						if lit, ok := e.(*ast.BasicLit); ok && lit.Kind == token.STRING {
							name, _ := strconv.Unquote(lit.Value)
							names = append(names, name)
						}
					}
				}
				return true
			})
		}
	}
	slices.Sort(names)
	return names
}

// options returns the Caddyfile's options as paths: "pool", "index memory". Those of
// policies begin with "policy" and the policy's name.
func (c *code) options() []string {
	found := make(map[string]bool)
	add := func(block string, lit *ast.CompositeLit) {
		for _, e := range lit.Elts {
			kv, ok := e.(*ast.KeyValueExpr)
			if !ok {
				continue
			}
			key, ok := kv.Key.(*ast.BasicLit)
			if !ok {
				continue
			}
			name, _ := strconv.Unquote(key.Value)
			found[strings.TrimSpace(block+" "+name)] = true
		}
	}
	for _, p := range c.packages {
		nested := make(map[*ast.CompositeLit]bool)
		p.calls(func(call *ast.CallExpr, within *ast.FuncDecl) {
			f, ok := call.Fun.(*ast.SelectorExpr)
			if !ok || f.Sel.Name != "readBlock" || len(call.Args) != 2 {
				return
			}
			lit, ok := f.X.(*ast.CompositeLit)
			if !ok || !isOptions(lit) {
				return
			}
			nested[lit] = true
			what := p.texts(call.Args[1], 0)[0]
			if policy, ok := strings.CutPrefix(what, "option of policy "); ok {
				add("policy "+policy, lit)
			} else {
				add(strings.TrimSuffix(what, " option"), lit)
			}
		})
		for _, file := range p.files {
			ast.Inspect(file, func(n ast.Node) bool {
				if lit, ok := n.(*ast.CompositeLit); ok && isOptions(lit) && !nested[lit] {
					add("", lit)
				}
				return true
			})
		}
	}
	return slices.Sorted(maps.Keys(found))
}

func isOptions(lit *ast.CompositeLit) bool {
	id, ok := lit.Type.(*ast.Ident)
	return ok && id.Name == "options"
}

// mustCode reads the code of this module.
func mustCode(t *testing.T) *code {
	t.Helper()
	c, err := readCode(repository, "handler", "kvscore", "affinity")
	if err != nil {
		t.Fatal(err)
	}
	return c
}
