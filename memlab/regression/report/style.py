"""The style sheet of the report: one column, one grey, red and green only for the outcome; light and dark."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --page: #fff; --card: #f6f8fa; --line: #d8dee4; --ink: #1b1f24; --soft: #57606a;
        --red: #b3261e; --redtint: #fdf1f0; --green: #1a7f37; --now: #0072b2; --was: #8c959f; }
@media (prefers-color-scheme: dark) {
  :root { --page: #15181c; --card: #1d2126; --line: #363c44; --ink: #e4e7ea; --soft: #9aa4ae;
          --red: #ff8d85; --redtint: #2b1d1e; --green: #65c983; --now: #56b4e9; --was: #7d8791; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1.25rem 1.25rem 3rem; color: var(--ink); background: var(--page);
       font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0; }
h2 { font-size: 1rem; margin: 2rem 0 .6rem; }
h3 { font-size: .9rem; margin: 1.1rem 0 .3rem; }
h3 .soft, th .soft { font-weight: 400; }
p { margin: .4rem 0; overflow-wrap: anywhere; }
a { color: var(--now); }
header { border-left: 6px solid var(--tone); padding: .2rem 0 .2rem 1rem; }
.red { --tone: var(--red); } .green { --tone: var(--green); }
h1, .mark { color: var(--tone); }
.soft, footer { color: var(--soft); font-size: .87rem; }
.mark { display: inline-block; font-weight: 700; width: 1.3em; }
.nights { align-items: end; display: inline-flex; gap: 3px; }
.nights i { background: var(--tone); border-radius: 1px; height: 7px; width: 9px; }
.nights i.red { height: 14px; }
details.case { border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0; }
details.case.red { background: var(--redtint); border-left: 4px solid var(--red); }
details.case > summary { cursor: pointer; display: grid; gap: 0 .8rem; grid-template-columns: 1fr auto;
                         list-style: none; padding: .5rem .8rem; }
details.case > summary::-webkit-details-marker { display: none; }
details.case > summary > b { font-weight: 600; overflow-wrap: anywhere; }
details.case.green > summary > b { font-weight: 400; }
details.case > summary > .why { grid-column: 1 / -1; padding-left: 1.3em; overflow-wrap: anywhere;
                                font-size: .9rem; line-height: 1.4; }
details.case > div { padding: 0 .9rem .9rem; }
summary { cursor: pointer; }
details.more > summary { color: var(--soft); font-size: .87rem; margin-top: .7rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem; margin: .4rem 0; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .22rem .7rem .22rem 0; text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: 500; padding-top: .6rem; }
th:first-child { color: var(--ink); font-weight: 600; }
td { overflow-wrap: break-word; }
td:last-child, th:last-child { padding-right: 0; }
td.number, th.number { font-variant-numeric: tabular-nums; text-align: right; white-space: nowrap; }
td.off { color: var(--red); font-weight: 600; }
td.trend { padding-bottom: 0; width: 110px; }
.steps { display: grid; gap: .8rem 1.2rem; grid-template-columns: repeat(auto-fit, minmax(16rem, 28rem)); }
figure { margin: .3rem 0; }
figcaption { font-size: .82rem; color: var(--soft); }
figcaption b { color: var(--ink); font-weight: 600; }
svg { display: block; max-width: 100%; }
svg.step { background: var(--card); border-radius: 4px; height: auto; width: 100%; }
svg path, svg polyline { fill: none; stroke-linejoin: round; vector-effect: non-scaling-stroke; }
svg .now { stroke: var(--now); stroke-width: 1.6; }
svg .was { stroke: var(--was); stroke-width: 1.4; }
svg.step .was { stroke-width: 3.5; opacity: .55; }
svg.trend .was { stroke-dasharray: 3 3; }
svg .dot { fill: var(--now); } svg .dot.off { fill: var(--red); }
footer { border-top: 1px solid var(--line); margin-top: 2rem; padding-top: .8rem; }
@media (max-width: 640px) { body { padding: 1rem .8rem 2rem; } }
"""
