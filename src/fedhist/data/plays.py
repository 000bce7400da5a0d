"""From the text of a play to what each role in it says, in whichever convention the play is printed.

Speakers stand on a line of their own (``HAMLET.``, ``Ham.``, ``THESEUS``) or before their first line (``  MACBETH. So
foul and fair``). A play keeps to one of these, so it is looked at as a whole before it is read.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

_ASIDE = re.compile(r"\[[^\[\]]{0,900}\]|\[[^\[\]\n]*$", re.MULTILINE)  # the second is a bracket that is never closed
_CAST = re.compile(r"^\W*(dramatis person(ae|æ)|persons represented|the persons of the play|characters)\W*$", re.I)
_HEADING = re.compile(
    r"^\s*(ACT|SCENE)\b|^\s*(Act|Scene) ([IVXLC]+|\d+)\b[.:]?\s*($|[A-Z])|"
    r"^\W*(INDUCTION|THE END|FINIS|DUMB SHOW|THE ORDER OF [A-Z ]*)\W*$"
)
_OPENING = re.compile(r"^\W*(ACT\b|SCENE\b|INDUCTION\b|(THE )?PROLOGUE\W*$|(ENTER )?CHORUS\W*$)", re.I)
_DIRECTION = re.compile(
    r"^\s*(Re-?enter|Enter|Exit|Exeunt|Manet|Manent|Flourish|Alarum|Alarums|Sennet|Curtain)\b"
    r"(?![,!?;'])(?!\.\s+[a-z])"
)
_AT_THE_EDGE = re.compile(r"\s{3,}(Re-?enter|Enter|Exit|Exeunt)\b.*$")
_NAME = (
    r"(?:\d\w{0,2} )?(?:[A-Z][A-Za-z]{0,2}\. )?[A-Z][A-Za-z'’\-]*"
    r"(?:(?:,? |\. (?=and |& ))(?:of|the|and|to|in|de|&|[A-Z0-9][A-Za-z'’\-]*)){0,5}"
)
_ALONE = re.compile(rf"^\s*({_NAME}?)([.:]?)\s*$")
_BEFORE = re.compile(rf"^(\s*)({_NAME}?)[.:]\s+(?=\S)")
_WORD = re.compile(r"[A-Z]+")
_NUMERAL = re.compile(r"^\s*[IVX]+\.?\s*$")
_ORDINALS = {"1": "FIRST", "2": "SECOND", "3": "THIRD", "4": "FOURTH", "5": "FIFTH", "6": "SIXTH", "7": "SEVENTH"}
_ORDINALS |= {"I": "FIRST", "II": "SECOND", "III": "THIRD", "IV": "FOURTH", "V": "FIFTH"}
_SMALL = {"A", "AND", "DE", "IN", "OF", "THE", "TO"}
_NOT_ROLES = {"SONG", "THE SONG", "DANCE", "MUSIC", "CONTENTS"}
_PRESENTERS = {"PROLOGUE", "THE PROLOGUE", "EPILOGUE", "THE EPILOGUE", "CHORUS"}
"""Stand like headings over what they say, in plays of every convention."""


def roles(text: str) -> dict[str, list[str]]:
    """Return the speeches of each role in a play, in their order, without stage directions and headings."""
    lines = [_AT_THE_EDGE.sub("", line) for line in _ASIDE.sub("", text.replace("_", "")).splitlines()]
    first = _first_line(lines)
    cast, body = _Cast.of(lines[:first]), lines[first:]
    spoken = [(label, speech) for label, speech in _spoken(body, _Speakers.of(body, cast)) if speech]
    names = _full_names({label for label, _ in spoken}, cast)
    speeches: dict[str, list[str]] = defaultdict(list)
    for label, speech in spoken:
        speeches[names[label]].append(speech)
    return dict(speeches)


def _first_line(lines: Sequence[str]) -> int:
    """Return where the play itself begins: at the first act, prologue or induction after the cast list."""
    cast = next((i for i, line in enumerate(lines) if _CAST.match(line)), 0)
    return next((i for i, line in enumerate(lines) if i >= cast and _OPENING.match(line)), 0)


@dataclass(frozen=True)
class _Cast:
    """The words of a cast list: those in names, and those in the descriptions after them."""

    names: frozenset[str]
    words: frozenset[str]

    @classmethod
    def of(cls, lines: Sequence[str]) -> "_Cast":
        """Read the lines before the play; without a cast list among them, nothing is known."""
        start = next((i + 1 for i, line in enumerate(lines) if _CAST.match(line)), len(lines))
        listed = [line.upper().replace("'S", "").replace("’S", "") for line in lines[start:]]
        names = {word for line in listed for word in _WORD.findall(re.split(r"[,;]| - ", line)[0])}
        return cls(frozenset(names), frozenset(word for line in listed for word in _WORD.findall(line)))

    def fitting(self, word: str) -> set[str]:
        """Return the words that this one may stand for: itself, or what it abbreviates, preferably in a name."""
        for known in (self.names, self.words):
            if len(word) == 1 or word in known or word in _SMALL or word in _ORDINALS.values():
                return {word}
            if longer := {each for each in known if each.startswith(word) and each not in (f"{word}S", f"{word}ES")}:
                return longer
        return set()

    def knows(self, label: str) -> bool:
        """Whether every word of a label is in the cast list, or begins a word there."""
        return all(map(self.fitting, label.split()))


@dataclass(frozen=True)
class _Speakers:
    """How a play prints its speakers."""

    labels: frozenset[str]
    capitals: bool
    dotted: bool

    @classmethod
    def of(cls, lines: Sequence[str], cast: _Cast) -> "_Speakers":
        """Find the convention that most lines of a play follow."""
        alone: dict[tuple[bool, bool], Counter[str]] = defaultdict(Counter)
        before: dict[bool, Counter[str]] = defaultdict(Counter)
        indents = Counter(len(line) - len(line.lstrip()) for line in lines if line.strip())
        usual = indents.most_common(1)[0][0] if indents else 0
        for previous, line in pairwise(["", *lines]):
            if _HEADING.match(line) or _DIRECTION.match(line) or _NUMERAL.match(line):
                continue
            if match := _ALONE.match(line):
                label, capitals = _tidy(match[1]), match[1].upper() == match[1]
                if len(label) > 1 and label not in _NOT_ROLES and (capitals or (match[2] and not previous.strip())):
                    alone[capitals, bool(match[2])][label] += 1
            elif match := _BEFORE.match(line):
                label, capitals = _tidy(match[2]), match[2].upper() == match[2] and len(match[2]) > 1
                if capitals or len(match[1]) < usual or cast.knows(label):
                    before[capitals][label] += 1
        dotted = [(capitals, found) for (capitals, dot), found in alone.items() if dot]
        by_capitals = {True: 0, False: 0}
        for capitals, found in (*dotted, *before.items()):
            by_capitals[capitals] += found.total()
        capitals = by_capitals[True] >= by_capitals[False]
        bare = sum(n for n in alone[True, False].values() if n > 1)
        has_dots = by_capitals[capitals] >= bare
        chosen = alone[capitals, True] + before[capitals] if has_dots else alone[True, False] + alone[True, True]
        usable = {label for label, n in chosen.items() if n > 1 or capitals or cast.knows(label)}
        return cls(frozenset(usable), capitals, has_dots)

    def split(self, line: str, previous: str) -> tuple[str, str] | None:
        """Return the speaker that a line begins with and the rest of the line, or None."""
        if match := _ALONE.match(line):
            written, dot, rest = match[1], bool(match[2]), ""
            if not dot and (written.upper() != written or (self.dotted and previous.strip())):
                return None
            if not dot and _tidy(written) in _PRESENTERS:
                return _tidy(written), ""
        elif match := _BEFORE.match(line):
            written, rest = match[2], line[match.end() :]
        else:
            return None
        if self.capitals != (written.upper() == written) or _tidy(written) not in self.labels:
            return None
        if not self.capitals and previous.strip() and not line.startswith(" "):
            return None  # such as a line of verse that is only a name
        return _tidy(written), rest


def _spoken(lines: Sequence[str], speakers: _Speakers) -> Iterator[tuple[str, str]]:
    """Yield each speaker and what they say until another speaks or the scene ends."""
    speaker, said = "", list[str]()
    for previous, line in pairwise(["", *lines]):
        if _DIRECTION.match(line) or _NUMERAL.match(line):
            continue
        heading = _HEADING.match(line)
        found = None if heading else speakers.split(line, previous)
        if heading or found:
            if speaker:
                yield speaker, " ".join(" ".join(said).split())
            speaker, said = found[0] if found else "", [found[1]] if found else []
        elif speaker:
            said.append(line)
    if speaker:
        yield speaker, " ".join(" ".join(said).split())


def _tidy(label: str) -> str:
    """Return a label in capitals, with its number as a word."""
    words = label.upper().replace("’", "'").replace(".", " ").replace(",", " ").split()
    if len(words) > 1:
        words[0] = _ORDINALS.get(words[0][0] if words[0][0].isdigit() else words[0], words[0])
    return " ".join(words)


def _full_names(labels: Collection[str], cast: _Cast) -> dict[str, str]:
    """Return the full name of each label: by the cast list or, where that says nothing, by unique prefix among labels.

    Of two names that an abbreviation may stand for, it is not the one that another label stands for alone: beside
    ``Corn.`` for Cornwall, ``Cor.`` is Cordelia.
    """
    words = {word for label in labels for word in label.split()}
    fitting = {word: cast.fitting(word) for word in words}
    taken = set[str]().union(*(names for word, names in fitting.items() if len(names) == 1 and word not in names))
    full = {}
    for word, names in fitting.items():
        left = names if len(names) == 1 else names - taken
        if not names:
            left = {other for other in words if other.startswith(word) and other not in (word, f"{word}S")}
        full[word] = left.pop() if len(left) == 1 else word
    return {label: " ".join(full[word] for word in label.split()) for label in labels}
