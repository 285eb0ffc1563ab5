package main

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// textKind is a kind of text. Tokenizers need more tokens for some kinds than for
// others.
type textKind string

// The kinds, with about the bytes a token that real tokenizers get out of them.
const (
	kindPlain    textKind = "plain"    // short English words: 3 to 4
	kindFormal   textKind = "formal"   // long English words: 5 to 7
	kindJSON     textKind = "json"     // compact JSON: 2 to 3
	kindCode     textKind = "code"     // indented source text: 2 to 4
	kindCyrillic textKind = "cyrillic" // Russian words: 4 to 6
	kindHan      textKind = "han"      // Chinese characters: 2 to 3
)

// kinds lists all kinds.
var kinds = []textKind{kindPlain, kindFormal, kindJSON, kindCode, kindCyrillic, kindHan}

var (
	plainWords = strings.Fields("the a of to in is it on as at by we he be do so no up if or an go all and any are but can did end few for get had has her him his how its let may new not now off old one our out own put run say see she six ten too top try two use was way who why yes you also back been both call came come day does down each even find from give good have here just keep know last left like line long look made make many more most much must name need next only open over part read same seem show side some such take tell than that them then they this time turn very want week well went were what when will with word work year")

	formalWords = strings.Fields("administration approximately availability characteristics circumstances collaboration communication comprehensive configuration consequently consideration corresponding demonstrated determination development documentation effectiveness environmental establishment exceptionally experimental fundamentally implementation independently infrastructure initialization instructions international interpretation investigation justification management maintenance measurements nevertheless notwithstanding observations opportunities organization participation particularly performance possibilities preparation professional qualifications recommendation reconstruction relationships representative requirements responsibility satisfactory significantly simultaneously specification straightforward subsequently sustainability systematically technological transformation transportation understanding unfortunately verification")

	cyrillicWords = strings.Fields("и в не на что тот быть весь это как она по но они мы этот который из у за вы так же от сказать для человек год один такой свой наш время день работа система запрос ответ память кэш сервер данные поле жизнь первый последний очень можно нужно после потому когда сколько значение результат измерение начало конец")

	hanRunes = []rune("的一是不了人我在有他这中大来上个国到说们为子和你地出道也时年得就那要下以生会自着去之过家学对可她里后小么心多天而能好都然没日于起还发成事只作当想看文无开手用主行方又如前所本见经头面公同三已老从动两长知民样现分将外但身些与高意进法此实回二理美点月明其种声全工己话儿者向情部正名定女问力机给等几很业最间新什打便位因重被走电四第门相次东政海口使教西再平真听世气信北少关并内加化由却代军产入先山五太水万市眼体别处总才场师书比住员九笑性通目华报立马命张活难神数件安表原车白应路期叫死常提感金何更反合放做系计或司利受光王果亲界及今京务制解各任至清物台象记边共风战干接它许八特觉望直服毛林题建南度统色字请交爱让认算论百吃义科怎元社术结六功指思非流每青管夫连远资队跟带花快条院变联言权往展该领传近留红治决周保达办运武半候七必城父强步完革深区即求品士转量空甚众技轻程告江语英基派满式李息写呢识极令黄德收脸钱党倒未持取设始版双历越史商千片容研像找友孩站广改议形委早房音火际则首单据导影失拿网香似斯专石若兵弟谁校读志飞观争究包组造落视济喜离虽坏")

	codeNames = strings.Fields("buf err ctx req resp n i key value node list next prev count total size index block chain worker session result handler config mutex table entry offset length token prompt")
	codeTypes = strings.Fields("int string error []byte uint64 bool map[string]int *node time.Duration io.Reader")
)

func pick[T any](rng *rand.Rand, list []T) T { return list[rng.IntN(len(list))] }

// textOf returns a text of one kind, of about so many bytes.
func textOf(rng *rand.Rand, k textKind, size int) string {
	var b strings.Builder
	for b.Len() < size {
		switch k {
		case kindPlain:
			sentence(&b, rng, plainWords)
		case kindFormal:
			sentence(&b, rng, formalWords)
		case kindCyrillic:
			sentence(&b, rng, cyrillicWords)
		case kindHan:
			for range 8 + rng.IntN(20) {
				b.WriteRune(pick(rng, hanRunes))
			}
			b.WriteString("。")
		case kindJSON:
			record(&b, rng)
		case kindCode:
			function(&b, rng)
		}
	}
	return b.String()
}

// mixed returns a text of several kinds, in stretches of 100 to 500 bytes.
func mixed(rng *rand.Rand, size int) string {
	var b strings.Builder
	for b.Len() < size {
		b.WriteString(textOf(rng, pick(rng, kinds), 100+rng.IntN(400)))
		b.WriteByte('\n')
	}
	return b.String()
}

func sentence(b *strings.Builder, rng *rand.Rand, words []string) {
	for i := range 5 + rng.IntN(12) {
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(pick(rng, words))
		if rng.IntN(9) == 0 {
			b.WriteByte(',')
		}
	}
	b.WriteString(pick(rng, []string{". ", ". ", "? ", ".\n\n"}))
}

func record(b *strings.Builder, rng *rand.Rand) {
	fmt.Fprintf(b, `{"id":%d,"name":"%s-%x","tags":["%s","%s"],"pos":{"x":%.3f,"y":-%.2f},"ok":%v,"at":"20%02d-%02d-%02dT%02d:%02d:00Z"},`,
		rng.IntN(1e6), pick(rng, codeNames), rng.IntN(1<<24), pick(rng, plainWords), pick(rng, codeNames),
		rng.Float64()*90, rng.Float64()*9, rng.IntN(2) == 0, rng.IntN(40), 1+rng.IntN(12), 1+rng.IntN(28), rng.IntN(24), rng.IntN(60))
}

func function(b *strings.Builder, rng *rand.Rand) {
	name := func() string { return pick(rng, codeNames) }
	fmt.Fprintf(b, "func %s%d(%s %s) (%s, error) {\n", name(), rng.IntN(100), name(), pick(rng, codeTypes), pick(rng, codeTypes))
	for range 2 + rng.IntN(4) {
		switch rng.IntN(3) {
		case 0:
			fmt.Fprintf(b, "\tif %s != nil {\n\t\treturn nil, %s\n\t}\n", name(), name())
		case 1:
			fmt.Fprintf(b, "\t%s := %s[%s+%d:]\n", name(), name(), name(), rng.IntN(64))
		default:
			fmt.Fprintf(b, "\tfor %s, %s := range %s.%s() {\n\t\t%s += %s\n\t}\n", name(), name(), name(), name(), name(), name())
		}
	}
	fmt.Fprintf(b, "\treturn %s, nil\n}\n\n", name())
}
