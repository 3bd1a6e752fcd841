"""The pictures of docs/assets that are drawn, not measured, as SVG; scripts/make_docs.py writes them.

Each has a background of its own, so that it is readable on any page, in light or dark colours as the reader prefers.
"""

import itertools
from html import escape

#: class: (colour in light pictures, in dark ones); of a box its fill, then the colour of its border
COLOURS = {
    "page": ("#ffffff", "#151b23"), "text": ("#1f2933", "#e8edf3"), "note": ("#55606e", "#a9b4c0"),
    "line": ("#55606e", "#a9b4c0"), "lane": ("#f4f6f8", "#1e2630"),
}  # fmt: skip
BOXES = {
    "blue": (("#dfe8ff", "#3f5fd6"), ("#24345f", "#86a2ff")),
    "teal": (("#d7f2ec", "#0b7a6a"), ("#123f3a", "#43c9b3")),
    "orange": (("#ffe9cf", "#c46a00"), ("#4b3212", "#f0a64a")),
    "green": (("#d9f3d6", "#2c7d2a"), ("#1c4020", "#6ccf68")),
    "red": (("#fde0de", "#c2322b"), ("#54201f", "#ff8a80")),
    "plain": (("#ffffff", "#8a96a3"), ("#151b23", "#7c8896")),
}
SANS, MONO = "Helvetica, Arial, 'DejaVu Sans', sans-serif", "Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def _style(dark: int) -> str:
    rules = [f".{name}{{fill:{colours[dark]}}}" for name, colours in COLOURS.items()]
    rules += [f".{n}{{fill:{pair[dark][0]};stroke:{pair[dark][1]}}}" for n, pair in BOXES.items()]
    return "".join(rules) + f".path{{stroke:{COLOURS['line'][dark]}}}"


class Picture:
    """A drawing of so many units; `svg` is its text. Coordinates are those of SVG, y downwards."""

    def __init__(self, width: int, height: int, description: str) -> None:
        self.size, self.description, self.parts = (width, height), description, []

    def box(self, x: float, y: float, width: float, height: float, kind: str, dashed: bool = False) -> None:
        """A rectangle of a class of BOXES, or without a border of COLOURS."""
        dashes = ' stroke-dasharray="4 4"' if dashed else ""
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"{dashes}/>')

    def text(self, x: float, y: float, text: str, kind: str = "text", size: int = 15, anchor: str = "middle",
             bold: bool = False, mono: bool = False) -> None:  # fmt: skip
        """A line of text whose baseline is at y."""
        weight = ' font-weight="bold"' if bold else ""
        font = f' font-family="{MONO}"' if mono else ""
        self.parts.append(
            f'<text class="{kind}" x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"{weight}{font}>'
            f"{escape(text)}</text>"
        )

    def arrow(self, path: str, dashed: bool = False) -> None:
        """An arrow along an SVG path."""
        dashes = ' stroke-dasharray="6 5"' if dashed else ""
        self.parts.append(
            f'<path class="path" d="{path}" fill="none" stroke-width="2"{dashes} marker-end="url(#head)"/>'
        )

    def token(self, x: float, y: float, text: str, kind: str, width: float = 76, dashed: bool = False) -> None:
        """A box with a token."""
        self.box(x, y, width, 36, kind, dashed)
        self.text(x + width / 2, y + 24, text, mono=True, size=16)

    def svg(self) -> str:
        width, height = self.size
        dark = f"@media (prefers-color-scheme: dark){{{_style(1)}}}"
        head = (
            '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
            '<path class="line" d="M0 0 10 5 0 10z"/></marker>'
        )
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="{SANS}">',
            f"<title>{escape(self.description)}</title>", f"<style>{_style(0)}{dark}</style>", f"<defs>{head}</defs>",
            f'<rect class="page" width="{width}" height="{height}" rx="10"/>', *self.parts, "</svg>", "",
        ])  # fmt: skip


def step() -> Picture:
    """A GRPO step: which process does what, and which columns the batch gains."""
    picture = Picture(1000, 552, "A GRPO step: which process does what, and which columns the batch gains")
    left, wide, box = 168, 138, 126  # of the columns of time
    lanes = {
        "blue": (14, "Driver", "one process, calls", "the others and", "keeps the batch"),
        "teal": (134, "Ranks", "one process per GPU;", "actor, rollout and", "reference model", "share its memory"),
        "orange": (292, "Reward processes", "rules or your", "own function"),
        "lane": (408, "The batch", "columns that each", "step adds; a row", "is a sample"),
    }
    for y, name, *lines in lanes.values():
        picture.box(10, y, 980, 150 if len(lines) == 4 else 132 if name == "The batch" else 108, "lane")
        picture.text(22, y + 27, name, bold=True, size=16, anchor="start")
        for i, line in enumerate(lines):
            picture.text(22, y + 49 + 19 * i, line, "note", 14, "start")
    steps = (
        ("blue", "1 Draw", "B prompts", "of the data"), ("teal", "2 Generate", "n samples for", "each prompt"),
        ("orange", "3 Score", "a number for", "each sample"), ("teal", "4 Log-probs", "by actor and", "reference"),
        ("blue", "5 Advantages", "score minus mean", "of its prompt"),
        ("teal", "6 Update", "gradient steps", "of the actor"),
    )  # fmt: skip
    tops = {"blue": 30, "teal": 184, "orange": 308}
    places = [(left + wide * i, tops[kind]) for i, (kind, *_) in enumerate(steps)]
    for (x, y), (kind, name, *lines) in zip(places, steps, strict=True):
        picture.box(x, y, box, 76, kind)
        picture.text(x + box / 2, y + 25, name, bold=True, size=16)
        for j, line in enumerate(lines):
            picture.text(x + box / 2, y + 46 + 18 * j, line, size=14)
    for (x, y), (later, below) in itertools.pairwise(places):
        picture.arrow(f"M{x + box} {y + 38}H{later + box / 2}V{below - 2 if below > y else below + 78}")
    new, old = places[5][0] + 24, places[1][0] + box - 24
    picture.arrow(f"M{new} 184V160H{old}V182", dashed=True)
    picture.text(places[3][0] + box / 2 - 40, 178, "new weights, for the next step", "note", 14)
    columns = ("uid", "input_ids"), ("responses", "response_mask"), ("token_level_", "scores"), (
        "old_log_probs", "ref_log_prob"), ("advantages",)  # fmt: skip
    for (x, _), names in zip(places, columns, strict=False):
        joined = names[0].endswith("_")  # one name on two lines
        for j, name in enumerate(names):
            if not (joined and j):
                picture.box(x - 3, 424 + 50 * j, box + 6, 58 if joined else 42, "plain")
            picture.text(x + box / 2, 450 + (20 if joined else 50) * j, name, mono=True, size=15)
    picture.text(places[5][0] + box / 2, 443, "then metrics,", "note", 14)
    picture.text(places[5][0] + box / 2, 462, "and a checkpoint", "note", 14)
    picture.text(places[5][0] + box / 2, 481, "when it is due", "note", 14)
    return picture


def speculation() -> Picture:
    """A block of speculative decoding whose mismatches a scorer judges."""
    picture = Picture(1000, 476, "Speculative decoding with a scorer: draft tokens, mismatches, verdicts, continuation")
    left, wide = 338, 106
    rows = (
        (24, "Draft model", "proposes a block"), (104, "Target model", "one forward: what it"),
        (184, "Comparison", ""), (254, "Scorer", "judges mismatches"), (372, "The text continues", ""),
    )  # fmt: skip
    for y, name, line in rows:
        picture.text(24, y + (17 if line else 25), name, bold=True, size=17, anchor="start")
        picture.text(24, y + 37, line, "note", 15, "start")
    picture.text(24, 160, "would write there", "note", 15, "start")
    draft, target = ("12", "/", "3", "=", "3", "each"), ("12", "÷", "3", "=", "4", "each")
    for y in (24, 372):
        picture.token(190, y, "bags hold", "plain", 130)
    picture.text(255, 80, "text so far", "note", 15)
    for i, (proposed, wanted) in enumerate(zip(draft, target, strict=True)):
        x, is_late, differs = left + wide * i, i == 5, proposed != wanted
        picture.token(x, 24, proposed, "orange", dashed=is_late)
        picture.token(x, 104, wanted, "blue", dashed=is_late)
        word = "not used" if is_late else "mismatch" if differs else "same"
        picture.text(x + 38, 209, word, "text" if differs else "note", 16, bold=differs)
    for i, kind, verdict, reason in ((1, "green", "accept", "harmless"), (4, "red", "reject", "harmful")):
        x = left + wide * i + 38
        picture.arrow(f"M{x} 218V252")
        picture.box(x - 50, 254, 100, 56, kind)
        picture.text(x, 278, verdict, bold=True, size=17)
        picture.text(x, 299, reason, size=15)
        picture.arrow(f"M{x} 312V370")
    picture.text(left + wide + 48, 346, "keep the draft's", "note", 15, "start")
    picture.text(left + wide * 4 + 48, 346, "take the target's", "note", 15, "start")
    for i, token in enumerate((*draft[:4], target[4])):
        picture.token(left + wide * i, 372, token, "blue" if i == 4 else "orange")
    picture.text(left + wide * 5, 388, "the next block", "note", 15, "start")
    picture.text(left + wide * 5, 407, "starts here", "note", 15, "start")
    summary = "5 tokens from one forward of the target. Exact match would keep 2: “12 ÷”."
    picture.text(190, 450, summary, size=16, anchor="start")
    return picture


def refinement() -> Picture:
    """Forwards of refine_iter=slide that turn a window of noise into final tokens."""
    picture = Picture(1000, 536, "A refinement window: three forwards turn noise into five final tokens")
    left, wide, noise = 196, 99, "noise"
    legend = (("blue", "last final token"), ("plain", "noise"), ("orange", "guess"), ("red", "wrong guess"),
              ("green", "becomes final"))  # fmt: skip
    for x, (kind, word) in zip((24, 206, 320, 432, 598), legend, strict=True):
        picture.box(x, 18, 24, 20, kind, kind == "plain")
        picture.text(x + 34, 33, word, "note", 15, "start")
    forwards = (
        (("so", noise, noise, noise), ("12", "/", "2", "="), 1, None,
         "The first prediction has read only final tokens: it is final. The others are guesses."),
        (("12", "/", "2", "="), ("/", "3", "=", "6"), 2, 2,
         "“/” repeats after final tokens, so it is final. “3” replaces the wrong guess “2”."),
        (("3", "=", "6", noise), ("=", "4", ".", "So"), 2, 2,
         "“=” repeats, and “4” replaces “6”. The window moves to the end of the final text."),
    )  # fmt: skip
    start = 0
    for number, (reads, predicts, final, wrong, sentence) in enumerate(forwards):
        y = 62 + 144 * number
        picture.text(24, y + 25, f"Forward {number + 1}", bold=True, size=17, anchor="start")
        picture.text(184, y + 25, "reads", "note", 15, "end")
        picture.text(184, y + 71, "predicts", "note", 15, "end")
        for i, token in enumerate(reads):
            kind = "blue" if i == 0 else "plain" if token == noise else "red" if i == wrong else "orange"
            picture.token(left + wide * (start + i), y, "" if token == noise else token, kind, dashed=token == noise)
            if token == noise:
                picture.text(left + wide * (start + i) + 38, y + 23, noise, "note", 15)
        for i, token in enumerate(predicts):
            picture.token(left + wide * (start + i + 1), y + 46, token, "green" if i < final else "orange")
        picture.text(left, y + 107, sentence, "note", 15, "start")
        start += final
    summary = "“so 12 / 3 = 4”: 5 tokens in 3 forwards, equal to those of one token per forward."
    picture.text(left, 512, summary, size=16, anchor="start")
    return picture


PICTURES = {"step": step, "speculation": speculation, "refinement": refinement}
