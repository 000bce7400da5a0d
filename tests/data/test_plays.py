"""Small plays in each convention that printed plays follow."""

from __future__ import annotations

import pytest

from fedhist.data.plays import roles

CAST = """THE TWO KINGS

by Nobody

PERSONS REPRESENTED.

Alaric, King of the North.
Cordula, daughter to Alaric.
Duke of Cornwall.
SIR JOHN OLDCASTLE, a knight.
Messengers, Soldiers.

ACT I.

"""

OWN_LINE = """SCENE I. A hall.

[Enter ALARIC and
CORDULA.]

ALARIC.
Good morrow, child. [Aside.] How pale
she is!

CORDULA.
Act not in haste, my lord.

[Exit ALARIC.]

He hears me not.

ALARIC. [Within]
I hear thee.

SCENE 2. A field.

Enter soldiers, with drums.

FIRST SOLDIER.
Halt.

Exeunt
THE END
"""
SAID = {
    "ALARIC": ["Good morrow, child. How pale she is!", "I hear thee."],
    "CORDULA": ["Act not in haste, my lord. He hears me not."],
    "FIRST SOLDIER": ["Halt."],
}


def changed(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


MIXED = changed(OWN_LINE, ("ALARIC.\n", "Al.\n"), ("CORDULA.\nAct", "Cord.\nAct"), ("ALARIC. [W", "Alar. [W"),
                ("FIRST SOLDIER.", "1 Sold."))  # fmt: skip
SAME_LINE = changed(OWN_LINE, ("ALARIC.\n", "  ALARIC. "), ("CORDULA.\nAct", "  CORDULA. Act"),
                    ("ALARIC. [Within]\n", "  ALARIC. [Within] "), ("FIRST SOLDIER.\n", "  FIRST SOLDIER. "),
                    )  # fmt: skip
BARE = changed(OWN_LINE, ("ALARIC.\n", "ALARIC\n"), ("CORDULA.\nAct", "CORDULA\nAct"), ("ALARIC. [W", "ALARIC [W"),
               ("FIRST SOLDIER.", "FIRST SOLDIER"))  # fmt: skip


@pytest.mark.parametrize("play", [OWN_LINE, MIXED, SAME_LINE, BARE], ids=["own line", "mixed", "same line", "bare"])
@pytest.mark.parametrize("cast", [True, False], ids=["cast", "no cast"])
def test_every_convention_gives_the_same_speeches(play: str, cast: bool) -> None:
    """Directions, headings and stage business are not speech, and a speech goes on after a direction."""
    if play is MIXED and not cast:
        pytest.skip("Al. and Cord. are nobody's name without a cast list")
    found = roles((CAST if cast else "") + play)
    soldier = next(name for name in found if name.startswith("FIRST"))
    found["FIRST SOLDIER"] = found.pop(soldier)
    assert found == SAID


def test_abbreviations_are_expanded_by_the_cast_list() -> None:
    spoken = (
        "Cor.\nOne.\n\nCorn.\nTwo.\n\nOld.\nThree.\n\nCordula.\nFour.\n\nMess.\nFive.\n\nCorn.\nSix.\n\nCor.\nSeven.\n"
    )
    assert roles(CAST + "\n" + spoken) == {
        "CORDULA": ["One.", "Four.", "Seven."],  # Corn. is Cornwall's, so Cor. is hers
        "CORNWALL": ["Two.", "Six."],
        "OLDCASTLE": ["Three."],
        "MESSENGERS": ["Five."],
    }


def test_abbreviations_are_expanded_by_unique_prefix_without_a_cast_list() -> None:
    speakers = ["HAM", "HAMLET", "KIN", "KING", "KINSMAN", "SERVANT", "SERVANTS"]
    numbers = ["One", "Two", "Three", "Four", "Five", "Six", "Seven"]
    spoken = "".join(f"{name}.\n{said}.\n\n" for name, said in zip(speakers, numbers, strict=True))
    assert roles("ACT I\n\n" + spoken) == {
        "HAMLET": ["One.", "Two."],
        "KIN": ["Three."],  # of the King or the kinsman: nobody knows
        "KING": ["Four."],
        "KINSMAN": ["Five."],
        "SERVANT": ["Six."],
        "SERVANTS": ["Seven."],
    }


def test_words_of_a_speech_are_not_speakers() -> None:
    """Short lines, lists, numerals and verse that begins with Act stay what somebody says."""
    text = (
        "ACT I\n\nANNE.\nFarewell.\n\nGood night.\nAct on it.\nII.\nO.\nSir. I go.\n\nBEN.\nAnne. Stay.\n\nANNE.\nNo.\n"
    )
    found = roles(text)
    assert found == {"ANNE": ["Farewell. Good night. Act on it. O. Sir. I go.", "No."], "BEN": ["Anne. Stay."]}


def test_a_text_without_speakers_has_no_roles() -> None:
    assert roles("") == {}
    assert roles("Shall I compare thee to a summer's day?\nThou art more lovely and more temperate.\n") == {}
