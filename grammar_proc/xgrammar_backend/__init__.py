"""The grammar backend xgrammar: converts guides to grammars in its EBNF, and follows them with
its matchers.
"""
