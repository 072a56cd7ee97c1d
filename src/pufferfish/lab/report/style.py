"""Style sheet of the page, for light and dark mode, and the script that sorts its tables."""

# The colours of Okabe and Ito, which are safe for colour-blind readers; lighter variants for dark mode.
CSS = """
:root{color-scheme:light dark;--ground:#fbfbfa;--card:#fff;--ink:#1b1d21;--soft:#62666d;--rule:#e3e4e6;--accent:#0072b2;
--good:#00714f;--bad:#b34700;--c0:#3c4046;--c1:#0072b2;--c2:#d55e00;--c3:#009e73;--c4:#b8558a;--c5:#c98600;--c6:#3a9bd6;
--data:#9aa0a6;--forward:#8cc4ea;--backward:#2b7fb8;--coding:#e69f00;--exchange:#d55e00;--optimizer:#009e73;--on:#fff}
@media(prefers-color-scheme:dark){:root{--ground:#15171a;--card:#1d2024;--ink:#eceef0;--soft:#a3a9b1;--rule:#33373d;--accent:#62b5ea;
--good:#4fd1a5;--bad:#ff9d5c;--c0:#d5d8dc;--c1:#4fa8e0;--c2:#f5813a;--c3:#2fc798;--c4:#e08fba;--c5:#f0b840;--c6:#8fd0f7;
--data:#7d848c;--forward:#9ccff0;--backward:#3f8fc6;--coding:#f0b429;--exchange:#e8702a;--optimizer:#26b487;--on:#101214}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
main{max-width:78rem;margin:0 auto;padding:2rem 1.25rem 4rem}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 .3rem;letter-spacing:-.01em}
h2{font-size:1.35rem;margin:3rem 0 .2rem;letter-spacing:-.005em}
h3{font-size:1.05rem;margin:2.2rem 0 .3rem}
p{margin:.3rem 0 .8rem;max-width:46rem}
.soft,figcaption,.notes,caption small{color:var(--soft);font-size:.9rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,13.5rem),1fr));gap:.9rem;margin:1.3rem 0 1.6rem;padding:0;list-style:none}
.cards li{background:var(--card);border:1px solid var(--rule);border-radius:.7rem;padding:.85rem 1rem;border-top:3px solid var(--accent)}
.cards b{display:block;font-size:1.6rem;line-height:1.25;letter-spacing:-.01em;font-variant-numeric:tabular-nums}
.cards span{display:block;font-size:.9rem;color:var(--soft)}.cards .who{color:var(--ink);font-weight:600}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--rule);border-radius:.7rem}
.scroll:focus-visible{outline:2px solid var(--accent)}
table{border-collapse:collapse;width:100%;font-size:.84rem;font-variant-numeric:tabular-nums}
caption{text-align:left;padding:.75rem .9rem .35rem;font-weight:600}
th,td{padding:.42rem .5rem;text-align:left;white-space:nowrap;border-top:1px solid var(--rule)}
thead th{color:var(--soft);font-weight:500;vertical-align:bottom;border-top:0;white-space:normal;min-width:3.6rem}
th:first-child{padding-left:.9rem}td:last-child,th:last-child{padding-right:.9rem}
tbody th{font-weight:600;position:sticky;left:0;background:var(--card)}
.n{text-align:right}
td.wrap{white-space:normal}
thead button{font:inherit;color:inherit;background:none;border:0;padding:0;cursor:pointer;text-align:inherit}
thead button:hover{color:var(--ink);text-decoration:underline}
[aria-sort=ascending] button::after{content:" ▲"}[aria-sort=descending] button::after{content:" ▼"}
.good{color:var(--good)}.bad{color:var(--bad)}td.good,td.bad{font-weight:600}
.bar{background:linear-gradient(var(--exchange),var(--exchange)) no-repeat right .5rem bottom 4px/calc((100% - 1rem)*var(--share)) 3px;padding-bottom:.62rem}
.bar.good{background-image:linear-gradient(var(--optimizer),var(--optimizer))}
.notes{margin:.7rem 0 0;padding-left:1.1rem;max-width:60rem}.notes li{margin:.15rem 0}
.scroll{margin-top:1rem}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem;align-items:start;margin-top:.8rem}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:.7rem;padding:.9rem 1rem 1rem}
figure>svg{display:block;width:100%;max-width:42rem;height:auto;overflow:visible;margin:.6rem auto 0}
figcaption b{color:var(--ink);font-size:1rem;display:block;font-weight:600}
.legend{display:flex;flex-wrap:wrap;gap:.2rem .9rem;list-style:none;padding:0;margin:.5rem 0 0;font-size:.85rem}
.legend li{display:flex;align-items:center;gap:.35rem}.swatch{width:.95rem;height:.95rem;flex:none;overflow:visible}
th .swatch{width:.8rem;height:.8rem;margin-right:.45rem;vertical-align:-.06em}
.spectra{display:grid;grid-template-columns:repeat(auto-fill,minmax(6.6rem,1fr));gap:.7rem;list-style:none;padding:0;margin:.8rem 0 0}
.spectra svg{width:100%;height:auto;display:block}.spectra span{display:block;font-size:.75rem;overflow-wrap:anywhere;line-height:1.25}
details{margin:1rem 0}summary{cursor:pointer;font-weight:600;padding:.2rem 0}
nav{margin:1rem 0}nav a{display:block}a{color:var(--accent)}
svg text{font-size:12.5px;fill:var(--soft)}svg .label{fill:var(--ink);font-weight:500}svg .name{fill:var(--ink)}
.grid{stroke:var(--rule);fill:none}.axis{stroke:var(--soft);fill:none}
.line{fill:none;stroke:var(--c);stroke-width:2.2;stroke-linejoin:round}.dashed{stroke-dasharray:6 4}
.spread{fill:var(--c);opacity:.16}.mark{fill:var(--c);stroke:var(--card);stroke-width:1}.leader{stroke:var(--c);fill:none;opacity:.55}
.before{--c:var(--soft);stroke-dasharray:4 3;stroke-width:1.6}.after{--c:var(--accent)}
.band{fill:var(--optimizer);opacity:.14}.ideal{stroke:var(--soft);stroke-dasharray:4 4;fill:none}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}.c5{--c:var(--c5)}.c6{--c:var(--c6)}
.part{fill:var(--data)}.part.forward{fill:var(--forward)}.part.backward{fill:var(--backward)}.part.exchange{fill:var(--exchange)}
.part.optimizer{fill:var(--optimizer)}.part.encode{fill:url(#encode)}.part.decode{fill:url(#decode)}.part.hidden{fill:url(#hidden)}
svg .inside{fill:var(--on);font-size:11.5px;font-weight:500}svg .inside.forward,svg .inside.encode,svg .inside.decode,svg .inside.data{fill:#101214}
svg .inside.encode,svg .inside.decode{paint-order:stroke;stroke:var(--coding);stroke-width:5px}
#encode rect,#decode rect{fill:var(--coding)}#encode path,#decode path{stroke:var(--card);stroke-width:1.3;opacity:.75}
#hidden rect{fill:var(--card)}#hidden path{stroke:var(--exchange);stroke-width:2}
.patterns{position:absolute;width:0;height:0}
@media(max-width:40rem){main{padding:1.2rem .8rem 3rem}h1{font-size:1.5rem}th,td{padding:.4rem .6rem}.cards{grid-template-columns:1fr 1fr;gap:.6rem}.cards li{padding:.6rem .7rem}.cards b{font-size:1.12rem}.cards span{font-size:.82rem;overflow-wrap:break-word}
figure{padding:.7rem .7rem .8rem}tbody th{min-width:8.6rem;max-width:10rem;white-space:normal;overflow-wrap:break-word}svg text{font-size:13.5px}}
@media print{body{background:#fff}.scroll,figure,.cards li{break-inside:avoid}}
"""

PATTERNS = """<svg class="patterns" aria-hidden="true"><defs>
<pattern id="encode" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6"/><path d="M-1 7L7-1"/></pattern>
<pattern id="decode" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6"/><path d="M-1-1L7 7"/></pattern>
<pattern id="hidden" width="5" height="5" patternUnits="userSpaceOnUse"><rect width="5" height="5"/><path d="M-1 6L6-1"/></pattern>
</defs></svg>"""

# The script turns headings into buttons, so that without scripts nothing looks clickable.
JS = """
for (const head of document.querySelectorAll("thead th")) {
  const table = head.closest("table"), column = head.cellIndex, button = document.createElement("button");
  if (!head.textContent || table.tBodies[0].rows.length < 2) continue;
  button.append(...head.childNodes); head.append(button);
  button.onclick = () => {
    const up = head.ariaSort !== "ascending";
    for (const other of table.tHead.rows[0].cells) other.ariaSort = null;
    head.ariaSort = up ? "ascending" : "descending";
    const key = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const gone = row => row.cells[column].textContent === "–";
    const order = (a, b) => key(a) - key(b) || String(key(a)).localeCompare(key(b), undefined, {numeric: true});
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(
      (a, b) => gone(a) - gone(b) || (up ? order(a, b) : order(b, a))));
  };
}
"""
