"""The style sheet of the page: for screens, light and dark, phones and paper.

The colours are Okabe and Ito's (2008), moved until each has a contrast of 3 to 1 with its background; dashes and
markers repeat what they say.
"""

LIGHT = """
--paper:#fff;--card:#f5f6f7;--ink:#1b1f23;--soft:#50575e;--rule:#d4d8dc;--link:#00558c;
--c0:#0072b2;--c1:#c85200;--c2:#00805c;--c3:#a8447f;--c4:#1b1f23;--c5:#946a00;--c6:#2a8ab8;--c7:#6b4fa0;
--good:#00694b;--bad:#a83e00;--shade:0,114,178;
"""
DARK = """
--paper:#14171a;--card:#1e2226;--ink:#e8eaec;--soft:#a9b1b8;--rule:#3c434a;--link:#7cc4f2;
--c0:#56b4e9;--c1:#f08a4b;--c2:#2fc59b;--c3:#e29ac6;--c4:#e8eaec;--c5:#e6b234;--c6:#9ad1f5;--c7:#b9a3f0;
--good:#4fd3ad;--bad:#ff9d66;--shade:86,180,233;
"""
COLOURS = 8
SERIES = "".join(f".s{n}{{stroke:var(--c{n});color:var(--c{n})}}.f{n}{{fill:var(--c{n})}}" for n in range(COLOURS))
THEME = (
    ":root{color-scheme:light dark;"
    + LIGHT
    + "}@media (prefers-color-scheme:dark){:root{"
    + DARK
    + "}}@media print{:root{color-scheme:light;"
    + LIGHT
    + "}}"
    + SERIES
)
CHART_RULES = """svg text{fill:var(--ink);font-family:inherit;font-size:12.5px}
svg .soft{fill:var(--soft)}
.axis{stroke:var(--soft);stroke-width:1;fill:none}
.grid{stroke:var(--rule);stroke-width:1;fill:none}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
.faint{fill:none;stroke:var(--rule);stroke-width:1.3}
.band{stroke:none;opacity:.16}
.mark{stroke:var(--paper);stroke-width:.8}
.whisker{fill:none;stroke-width:2.4}
.ring{fill:none;stroke:var(--ink);stroke-width:1.6}
.ideal{stroke:var(--soft);stroke-width:1.2;stroke-dasharray:3 4;fill:none}
.d1{stroke-dasharray:7 3}.d2{stroke-dasharray:8 3 2 3}.d3{stroke-dasharray:2 3}
"""
CHART_CSS = THEME + CHART_RULES
"""For a chart in a file of its own."""
CSS = (
    THEME
    + """
*{box-sizing:border-box}
html{scroll-behavior:smooth;-webkit-text-size-adjust:100%}
@media (prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
body{margin:0;background:var(--paper);color:var(--ink);font:1rem/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Noto Sans","Liberation Sans",sans-serif;overflow-wrap:break-word}
a{color:var(--link)}
:focus-visible{outline:3px solid var(--c1);outline-offset:2px}
.skip{position:absolute;left:-99rem;background:var(--paper);padding:.6rem 1rem;z-index:2}
.skip:focus{left:.5rem;top:.5rem}
.unseen{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
header,main,footer,.contents{max-width:66rem;margin:0 auto;padding:0 1.1rem}
header{padding-top:1.8rem}
.kind{color:var(--soft);margin:0;font-size:.95rem}
h1{font-size:clamp(1.6rem,4.5vw,2.3rem);line-height:1.2;margin:.1rem 0 .6rem}
h2{font-size:1.4rem;line-height:1.25;margin:2.8rem 0 .6rem;padding-top:.9rem;border-top:1px solid var(--rule)}
h3{font-size:1.08rem;margin:1.6rem 0 .4rem}
p,ul,ol,dl{max-width:46rem}
p{margin:.5rem 0 .8rem}
.lead{font-size:1.18rem;line-height:1.5;margin:.3rem 0 .7rem}
.verdict{background:var(--card);border-left:5px solid var(--c0);padding:.8rem 1.1rem;margin:1rem 0;max-width:52rem}
.verdict p:last-child,.verdict ul:last-child{margin-bottom:0}
.note{color:var(--soft);font-size:.93rem}
.who{display:grid;grid-template-columns:repeat(auto-fit,minmax(14.5rem,1fr));gap:.8rem;list-style:none;padding:0;
margin:1.2rem 0;max-width:none}
.who>li{background:var(--card);padding:.7rem 1rem .8rem;border-top:3px solid var(--c0)}
.who h3{margin:0 0 .3rem}
.who ul{margin:0;padding-left:1.1rem}
.who li li{margin:.15rem 0;line-height:1.4}
.scroll{position:relative;overflow-x:auto;margin:.9rem 0;max-width:100%}
table{border-collapse:collapse;font-size:.93rem;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding-bottom:.4rem;max-width:46rem}
th,td{text-align:left;vertical-align:top;padding:.36rem .8rem .36rem 0;border-bottom:1px solid var(--rule)}
thead th{border-bottom:2px solid var(--soft);vertical-align:bottom}
tbody th{font-weight:500}
.n{text-align:right;white-space:nowrap}
@media screen{td:not(.n){min-width:7rem}.cells td{min-width:4.6rem}}
.cells td{padding:.45rem .7rem;text-align:right;border:1px solid var(--rule)}
td small{display:block;color:var(--soft);font-size:.86em;white-space:nowrap}
.cells small{color:inherit}
.cells td:empty{border:0}
.up{color:var(--good);font-weight:600}
.down{color:var(--bad);font-weight:600}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,21rem),1fr));gap:1.2rem 2rem;
align-items:start}
.small{grid-template-columns:repeat(auto-fit,minmax(min(100%,15rem),1fr))}
figure{margin:1rem 0;max-width:33rem;break-inside:avoid}
.small figure{margin:.2rem 0}
figure.wide{max-width:none}
figcaption{margin-bottom:.4rem;font-size:.95rem;line-height:1.4}
svg.plot{display:block;width:100%;height:auto;overflow:visible}
"""
    + CHART_RULES
    + """
.legend{list-style:none;padding:0;margin:.3rem 0 .5rem;display:flex;flex-wrap:wrap;gap:.15rem 1.1rem;font-size:.9rem}
.legend svg{width:2.2rem;height:.8rem;margin-right:.35rem;vertical-align:-.05rem}
img{display:block;max-width:min(100%,52rem);height:auto;background:#fff;padding:.3rem}
details{margin:.4rem 0 1rem}
summary{cursor:pointer;color:var(--link);padding:.2rem 0}
pre{background:var(--card);padding:.8rem 1rem;overflow-x:auto;font-size:.86rem;line-height:1.45}
code{font-family:ui-monospace,"SF Mono",Consolas,"Liberation Mono",monospace;font-size:.93em}
.contents ol{columns:16rem;padding-left:1.4rem;max-width:none}
.contents li{break-inside:avoid}
footer{padding-top:2rem;padding-bottom:3rem;color:var(--soft);font-size:.9rem}
@media print{
@page{size:A4;margin:16mm 15mm}
html{font-size:9.5pt}
header,main,footer,.contents{max-width:none;padding:0}
a{color:inherit;text-decoration:none}
.skip{display:none}
h2{break-after:avoid;margin-top:1.6rem}h2+p,h3,h4,caption,figcaption{break-after:avoid}
p,li{orphans:3;widows:3}thead,tbody tr:first-child{break-after:avoid}
tr,.verdict,.who>li{break-inside:avoid}
.scroll{overflow:visible}
table{font-size:.86rem}.n{white-space:normal}
th,td{padding:.2rem .5rem .2rem 0}
.figures{grid-template-columns:1fr 1fr}
.small{grid-template-columns:1fr 1fr 1fr}
figure{max-width:12cm}
.figures figure{max-width:none}
img{max-height:23cm;width:auto}
.who{grid-template-columns:repeat(4,1fr);gap:.5rem}
figure details,.contents-all,summary{display:none}
details::details-content{content-visibility:visible;block-size:auto}
pre{white-space:pre-wrap;font-size:.78rem}details pre{columns:2}
}
"""
)
