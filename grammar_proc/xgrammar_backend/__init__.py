"""The grammar backend xgrammar: guides become grammars in its EBNF, its matchers follow them."""
