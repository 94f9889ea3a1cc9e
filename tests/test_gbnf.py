"""GBNF grammars: what they match, after they have become Lark, and what is wrong with bad ones."""

from __future__ import annotations

import pytest
from grammars import compiler, matches

from rvllm.gbnf import is_gbnf, to_lark
from rvllm.structured_output import StructuredOutput

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws ( value ("," ws value)* )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""


@pytest.mark.parametrize(
    ("grammar", "text", "wrong"),
    [
        ('root ::= "yes" | "no"', "yes", "yeno"),
        ('root ::= [a-z]+ "z!"', "abz!", "abc!"),  # no lexer that takes all letters at once
        ('root ::= ("a" | "ab" | "abb") "bc"', "abc", "abb!"),
        ('root ::= s "y"\ns ::= "x" s "x" | [a-z]+ "z"', "xxabczxxy", "xxabczx!"),
        ('root ::= a-b{2,3}\na-b ::= "x" | "yy"', "xyyx", "xxxx"),
        ('root ::= "a"{2} "b"{1,} "c"{,2}', "aabbbcc", "aac"),
        ('root ::= "\\u00e9" [/"\\]] . "\\x41\\n"', 'é]\nA\n', "é]\nB"),
        ('root ::= [^a-c\\n]* "\\\\" "" [-x]', "xyz\\-", "xb"),
        ('root ::= "a" ("b" | )', "ab", "ac"),
        ('root ::= start\nstart ::= 1x fooBar foo-bar\n1x ::= "1"\nfooBar ::= "2"\nfoo-bar ::= "3"', "123", "13"),
        (JSON, '{"a": [1, -2.5e3, "x\\n"],\n  "b": {"c": null}}', '{"a": [1 2'),
        (ARITHMETIC, "a +3*(b2)= 5\nc=d\n", "a +3*(b2= "),
    ],
)  # fmt: skip
def test_matches(grammar: str, text: str, wrong: str) -> None:
    assert is_gbnf(grammar)
    output = StructuredOutput(grammar=grammar)
    assert matches(output, text)
    assert not matches(output, wrong)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root ::= "a', 'line 1: " is not closed by "'),
        ('x ::= "a"', "no rule 'root'"),
        ("root ::= foo", "rule 'foo' is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2: rule 'root' is there twice"),
        ('root ::= "a" $', r"line 1: unexpected '\$'"),
        ("root ::= [z-a]", "the range 'z' to 'a' is empty"),
        ("root ::= []", r"\[\] matches nothing"),
        ("root ::= [a", r"\[ is not closed by ]"),
        ('root ::= ("a"', r"expected \)"),
        ('root ::= "a"{x}', "expected a repetition"),
        ('root ::= "a"{3,2}', "ends below its beginning"),
        ('root ::= "a"{99999}', "at most 10000 times"),
        (r'root ::= "\q"', r"the escape \\q is not known"),
        (r'root ::= "\ud800"', "is no character"),
        ("root ::= <think>", "tokens .* are not supported"),
        ("root ::= " + "(" * 20_000, "more than 100 parentheses"),
        ('root ::= "a"' + "*" * 3000, "line 1: more than 100 repetitions of repetitions"),
        ("root ::= " + "(" * 90 + '"a"' + (")" + "?" * 90) * 90, "too much is within each other"),
        ("root ::= root", "no text can match"),
    ],
)
def test_errors_name_the_line(grammar: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compiler().compile(StructuredOutput(grammar=grammar))


def test_rules_that_multiply_stay_small() -> None:
    grammar = 'root ::= r0\n' + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60 ::= "a"'  # fmt: skip
    assert len(to_lark(grammar)) < 10_000


def test_telling_gbnf_takes_linear_time() -> None:
    assert not is_gbnf("a" * 10**6)
    assert not is_gbnf("a b" * 10**6)
    assert is_gbnf("# a comment\n" * 10 + "  root ::= x")
    assert len(to_lark("root ::= " + '("a") ' * 20_000)) > 20_000
