"""The frame of a self-contained HTML page: style for both colour schemes, tables that scroll, no script."""

from collections.abc import Iterable, Sequence
from html import escape

PALETTE = (
    ("#6b7280", "#9ca3af"),
    ("#2563eb", "#60a5fa"),
    ("#d9480f", "#fb923c"),
    ("#0f766e", "#2dd4bf"),
    ("#9333ea", "#c084fc"),
    ("#b45309", "#facc15"),
    ("#be123c", "#fb7185"),
    ("#4d7c0f", "#a3e635"),
)

STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1b1f24; --soft: #5b6470; --line: #d9dde3; --band: #f5f6f8;
  --good: #16a34a; --bad: #dc2626; --warn: #b45309; LIGHT }
@media (prefers-color-scheme: dark) { :root { --bg: #14171b; --fg: #e6e8eb; --soft: #9aa4b0; --line: #343a42;
  --band: #1c2026; --good: #22c55e; --bad: #f87171; --warn: #fbbf24; DARK } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 74rem; padding: 1.5rem 1rem 4rem; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.6rem; margin: 0 0 .3rem } h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem }
p, ul { max-width: 62rem } code { font-size: .92em; overflow-wrap: anywhere }
.soft, figcaption { color: var(--soft) } .warn { color: var(--warn) }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; min-width: 100% }
th, td { padding: .28rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
thead th { background: var(--band); white-space: normal; min-width: 5.5rem; max-width: 9rem;
  vertical-align: bottom } tbody tr:last-child > * { border-bottom: 0 }
th:first-child, td:first-child, .text td { text-align: left }
thead th:first-child { min-width: 0 } .heat td { min-width: 4rem; text-align: center }
.heat thead th:not(:first-child) { min-width: 4rem; text-align: center }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 1.2rem }
figure { margin: 0; min-width: 0 } figcaption { font-weight: 600; margin-bottom: .3rem }
svg { width: 100%; height: auto; display: block } svg text { fill: var(--soft); font: 12px system-ui, sans-serif }
.grid { stroke: var(--line); stroke-width: 1 } polyline { fill: none; stroke: var(--c); stroke-width: 2 }
circle { fill: var(--c) } circle:hover { r: 6 } .bar { stroke: var(--c); stroke-width: 1.5; opacity: .6 }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: .3rem 0 0; padding: 0 0 0 .5rem;
  font-size: .85rem } .legend li { display: flex; align-items: center; gap: .4rem } .key { width: 30px; height: 10px }
details { margin: .5rem 0 } pre { overflow-x: auto; background: var(--band); padding: .7rem; border-radius: 6px;
  font-size: .8rem }
"""


def page(title: str, body: Iterable[str]) -> str:
    """A whole document."""
    colors = [" ".join(f"--p{i}: {pair[side]};" for i, pair in enumerate(PALETTE)) for side in (0, 1)]
    style = STYLE.replace("LIGHT", colors[0]).replace("DARK", colors[1])
    style += "".join(f".s{i} {{ --c: var(--p{i}) }} " for i in range(len(PALETTE)))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>\n'
        f"<body>\n{chr(10).join(body)}\n</body></html>\n"
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]], text: bool = False) -> str:
    """A table in a box of its own that scrolls sideways; ``text`` aligns all columns left."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    kind = "scroll text" if text else "scroll"
    return f'<div class="{kind}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
