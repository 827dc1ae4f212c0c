"""Where each token came from: drafted and accepted, replacement, bonus, or the prompt pass."""

from __future__ import annotations

import html
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Patch, Rectangle

from dspec_lab.core.types import TokenSource
from dspec_lab.plots.style import FONT_SIZE, INK, SOURCES, LabFigure, new_figure
from dspec_lab.verifier.stopping import TokenDecoder

# made visible, because a drafter's hits are often blanks
SPACE, NEWLINE, TAB, RETURN = "·", "↵", "⇥", "␍"
WRAP = 96  # characters a line of the static figure
MONO = FontProperties(family="DejaVu Sans Mono", size=FONT_SIZE)
MISSING = "□"


def token_pieces(tokenizer: TokenDecoder, token_ids: Sequence[int]) -> list[str]:
    """The text each token adds, special tokens included; joined, they are the decoded text.

    A token that ends inside a character (one emoji can be four tokens) adds "" and the one that completes it adds the
    whole character. Bytes that never become one stay visible as U+FFFD.
    """
    pieces: list[str] = []
    done = ""
    for end in range(1, len(token_ids) + 1):
        text = tokenizer.decode(list(token_ids[:end]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if text.endswith("\ufffd") and end < len(token_ids):
            pieces.append("")
            continue
        pieces.append(text[len(done) :])
        done = text
    return pieces


def tokens_html(pieces: Sequence[str], sources: Sequence[TokenSource]) -> str:
    """An HTML fragment: each token in the colour and edge of its source, whitespace visible, legend below.

    The text is escaped: whatever the model writes is shown, never interpreted.
    """
    _check(pieces, sources)
    spans = [_span(index, piece, source) for index, (piece, source) in enumerate(zip(pieces, sources, strict=True))]
    used = [source for source in SOURCES if source in sources]
    legend = " ".join(
        f'<span style="{_box(source)}">{html.escape(SOURCES[source][0])}: {list(sources).count(source)}</span>'
        for source in used
    )
    return (
        f'<div style="font-family:monospace;line-height:1.9;color:{INK};background:#fff;padding:6px;'
        f'overflow-wrap:anywhere" role="group" aria-label="Generated tokens by source">{"".join(spans)}</div>'
        f'<div style="font-size:90%;color:{INK};background:#fff;padding:2px 6px 6px;line-height:1.9">{legend}</div>'
    )


def outcomes_figure(pieces: Sequence[str], sources: Sequence[TokenSource], *, title: str = "") -> LabFigure:
    """The tokens as boxes in the colour of their source, wrapped like text; characters without a glyph are □."""
    _check(pieces, sources)
    height = 0.95 + 0.25 * len(outcome_lines(pieces))
    counts = ", ".join(f"{list(sources).count(source)} {SOURCES[source][0]}" for source in SOURCES if source in sources)
    figure = new_figure(9.0, height, alt=f"Generated text with each token's source: {counts}.")
    draw_outcomes(figure.add_subplot(), pieces, sources, title=title)
    return figure


def draw_outcomes(
    axes: Axes, pieces: Sequence[str], sources: Sequence[TokenSource], *, title: str = "", wrap: int = WRAP
) -> None:
    """Draw the boxes of `outcomes_figure` into `axes`."""
    _check(pieces, sources)
    lines = outcome_lines(pieces, wrap)
    axes.set_xlim(0, wrap)
    axes.set_ylim(len(lines), 0)
    axes.axis("off")
    for row, line in enumerate(lines):
        for column, text, index in line:
            _, fill, edge = SOURCES[sources[index]]
            axes.add_patch(
                Rectangle((column, row + 0.08), len(text), 0.84, facecolor=fill, edgecolor=edge, linewidth=0.8)
            )
            for offset, letter in enumerate(text):
                # one letter a cell, so that boxes fit whatever the font's width; "$" is a dollar, not mathematics
                axes.text(
                    column + offset + 0.5, row + 0.5, letter, fontproperties=MONO, color=INK,
                    ha="center", va="center_baseline", parse_math=False,
                )  # fmt: skip
    used = [source for source in SOURCES if source in sources]
    handles = [Patch(facecolor=SOURCES[s][1], edgecolor=SOURCES[s][2], label=SOURCES[s][0]) for s in used]
    axes.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0, 0), ncols=max(1, len(used)), frameon=False,
        fontsize=FONT_SIZE - 1, borderaxespad=0.2,
    )  # fmt: skip
    if title:
        axes.set_title(title, fontsize=FONT_SIZE + 1, color=INK, loc="left")


def _check(pieces: Sequence[str], sources: Sequence[str]) -> None:
    if len(pieces) != len(sources):
        raise ValueError(f"{len(pieces)} pieces of text but {len(sources)} sources")
    unknown = sorted(set(sources) - set(SOURCES))
    if unknown:
        raise ValueError(f"no token source is called {unknown[0]!r}; there are {', '.join(SOURCES)}")


def _visible(text: str) -> str:
    for blank, sign in ((" ", SPACE), ("\r", RETURN), ("\n", NEWLINE), ("\t", TAB)):
        text = text.replace(blank, sign)
    return text


def _box(source: TokenSource) -> str:
    _, fill, edge = SOURCES[source]
    # the edge differs in kind too: a bar below for drafts, a frame for what the target chose itself
    line = f"border-bottom:2px solid {edge}" if source == "draft" else f"border:1px solid {edge}"
    return f"background:{fill};color:{INK};{line};border-radius:2px;padding:0 1px;margin:0 1px"


def _span(index: int, piece: str, source: TokenSource) -> str:
    shown = html.escape(_visible(piece)) if piece else "&#8203;"
    label = html.escape(f"token {index + 1}: {SOURCES[source][0]}", quote=True)
    span = f'<span style="{_box(source)}" title="{label}">{shown}</span>'
    return span + "<br>" * piece.count("\n")


def outcome_lines(pieces: Sequence[str], wrap: int = WRAP) -> list[list[tuple[int, str, int]]]:
    """Lines of (column, text, token index): wrapped at `wrap` characters and after each newline."""
    lines: list[list[tuple[int, str, int]]] = [[]]
    column = 0
    for index, piece in enumerate(pieces):
        text = _drawable(_visible(piece))
        while text:
            if column >= wrap or (column and column + len(text) > wrap and len(text) < wrap // 3):
                lines.append([])
                column = 0
            cut = text.find(NEWLINE) + 1 if NEWLINE in text else len(text)
            part = text[: min(cut, wrap - column)]
            lines[-1].append((column, part, index))
            column += len(part)
            text = text[len(part) :]
            if part.endswith(NEWLINE):
                lines.append([])
                column = 0
    if not lines[-1] and len(lines) > 1:
        lines.pop()
    return lines


def _drawable(text: str) -> str:
    font = get_font(findfont(MONO))
    return "".join(letter if font.get_char_index(ord(letter)) else MISSING for letter in text)
