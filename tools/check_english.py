"""Check the words of the repository: docstrings, comments, messages and docs.

python tools/check_english.py [--sentences]

Exits with 1 when a docstring opens with a question word, or when a private term stands where the field has one. With
`--sentences`, or when all is well, it also lists the sentences of hand-written docs that are longer than 35 words.
"""

import argparse
import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONGEST_SENTENCE = 35
GENERATED = "docs/reports"
EXAMPLES_OF_TERMS = {Path(__file__).resolve(), ROOT / "tests" / "test_english.py"}

QUESTION = re.compile(r"(What|Who|Which|Whose|Whether|How)\b")

PRIVATE_TERMS = {
    r"(is|are|was|were|be|been|not) met\b|\bmeets? (a |the |its |all |every )?(calls?|model|module)": "intercepted",
    r"\bvisitors?\b|\bvisit(ed|ing|s)?\b": "interceptor, intercepted",
    r"\bwho looks?\b|\bthose who look\b|\blooks at (a|the) call": "observer, observes",
    r"(?<!divide.)(?<!divides.)\bevenly\b|\bweights (are|is) even\b|\beven weights?\b": "uniform attention",
    r"\brests? on\b|\bplaces? to rest\b": "attends to by default, attention sink",
    r"\bforetold\b|\bforetells?\b|\bproph": "predicted",
    r"\btold apart\b|\btell apart\b|\bcan(not)? be told\b|\bcan tell\b": "significantly different, distinguishable",
    r"\bwhat (a|the|its|each|every|one) heads? gives?\b|\bwhat heads (give|gave)\b": "a head's output",
    r"\bwhat (it|they|a head|heads|each head|every head)( is| are)? worth\b|\bhead is worth\b|\bheads are worth\b": (
        "importance, ablation effect"
    ),
    r"\bwhat is known of\b|\bknown of (a|the) call\b": "call context",
    r"\bbeside\b": "with, next to, in addition to",
    r"\b(narrow|wide) (scores?|products?|blocks?)\b": "bfloat16 scores, float32 scores",
    r"\bmanners?\b": "modes",
    r"\bledgers?\b": "trial store",
    r"\bdeal(s|t)? out\b|\bhand(s|ed)? out (work|trials?)\b": "schedule, claim a trial",
    r"\b(in|within) reach\b": "access to",
    r"\bunless given\b": "by default",
    r"\bgoes on where\b|\bgo on where\b": "resumes",
    r"\bas it (ever )?was\b|\bas they were\b": "unchanged",
    r"\bis no (padding|tensor|mask|head|module)\b": "is not padding, is not a tensor",
}
"""Private terms, as patterns, and what the field calls the same thing."""


def main() -> int:
    """Print every finding and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", action="store_true", help="list long sentences also when there are findings")
    options = parser.parse_args()
    files = [ROOT / name for name in tracked() if not name.startswith(GENERATED)]
    findings = [finding for file in files if file not in EXAMPLES_OF_TERMS for finding in findings_in(file)]
    print("\n".join(findings), end="\n" if findings else "")
    if options.sentences or not findings:
        print(f"Sentences of more than {LONGEST_SENTENCE} words, which are not findings:")
        print("\n".join(sentence for file in files if file.suffix == ".md" for sentence in long_sentences(file)))
    print(f"English: {len(findings)} findings in {len(files)} files")
    return 1 if findings else 0


def tracked() -> list[str]:
    """Return the Python and Markdown files that git tracks, relative to the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.md"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [name for name in names if (ROOT / name).exists()]


def findings_in(file: Path) -> Iterator[str]:
    """Yield one line for each opening or term of a file that the standard forbids."""
    name = file.relative_to(ROOT)
    if file.suffix == ".py":
        for line, text in docstrings(file):
            if QUESTION.match(text):
                yield f"{name}:{line}: a docstring opens with a question word: {text.splitlines()[0][:80]}"
    for line, text in prose(file):
        for pattern, better in PRIVATE_TERMS.items():
            for match in re.finditer(pattern.replace(" ", r"\s+"), text, re.IGNORECASE):
                at = line + text[: match.start()].count("\n")
                yield f"{name}:{at}: write {better!r} for {' '.join(match.group().split())!r}"


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring, those of attributes and constants among them."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def prose(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of what is written for people: strings and comments of Python, the whole of Markdown."""
    if file.suffix == ".md":
        yield 1, file.read_text(encoding="utf-8")
        return
    with file.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)):
                yield token.start[0], token.string


def long_sentences(file: Path) -> Iterator[str]:
    """Yield the sentences of a page that have more words than `LONGEST_SENTENCE`, code and tables aside."""
    text = re.sub(r"```.*?```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line for line in paragraph.splitlines() if not line.lstrip().startswith(("|", "#", "!"))]
        for sentence in re.split(r"(?<=[.:;?!])\s+|\n[-*] ", "\n".join(lines)):
            if (words := len(sentence.split())) > LONGEST_SENTENCE:
                yield f"{file.relative_to(ROOT)}: {words} words: {' '.join(sentence.split())[:100]}..."


if __name__ == "__main__":
    sys.exit(main())
