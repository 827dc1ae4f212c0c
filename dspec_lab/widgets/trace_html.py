"""The trace viewer as one static HTML file: no server, nothing loaded from elsewhere, 10^5 rounds page by page."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import numpy as np

from dspec_lab.core.files import write_text
from dspec_lab.widgets.trace_table import TraceTable, token_texts

SCALE = 1000  # chances and bits are stored as whole thousandths
PAGE = 50  # rounds shown at once

_STYLE = """
body{font:14px/1.4 system-ui,sans-serif;color:#1a1a1a;background:#fff;margin:1em}
form{display:flex;flex-wrap:wrap;gap:.4em 1.2em;align-items:center;margin:.6em 0}
.r{border-top:1px solid #ddd;padding:4px 0;display:flex;flex-wrap:wrap;align-items:flex-start;gap:3px}
.h{width:16em;color:#555;font-size:12px}
.t{font-family:monospace;border-radius:2px;padding:0 2px;text-align:center;color:#1a1a1a}
.t small{display:block;color:#444;font-size:10px}
.accepted{background:#BFE3F7;border-bottom:2px solid #0072B2}
.rejected{background:#FFD9B8;border-bottom:2px dashed #D55E00;text-decoration:line-through}
.discarded{background:#EDEDED;border-bottom:2px dotted #6B6B6B;text-decoration:line-through}
.extra{background:#BFEBDD;border:1px solid #009E73}
.cut{outline:2px solid #CC79A7}
"""

_SCRIPT = """
const D = JSON.parse(document.getElementById('data').textContent);
const $ = id => document.getElementById(id), N = D.gamma.length;
const at = (name, i) => D[name].slice(D.start[name][i], D.start[name][i + 1]);
const num = (x, digits) => (x / 1000).toFixed(digits);
function fill(id, items) {
  for (const item of ['all', ...items]) {
    const o = document.createElement('option');
    o.textContent = item;
    $(id).append(o);
  }
}
fill('domain', D.domains);
fill('request', D.requests);
let rows = [], page = 0;
function kept(i, t) {
  const c = at('confidence', i);
  let a = 1, k = 0;
  for (; k < c.length; k++) { a *= c[k] / 1000; if (a < t) break; }
  return c.length ? k : D.gamma[i];
}
function passes(i, d, r, s, t) {
  if (d > 0 && D.domain[i] !== d - 1) return false;
  if (r > 0 && D.request[i] !== r - 1) return false;
  const g = D.gamma[i], n = D.num_accepted[i];
  if (s === 'rejected') return n < g;
  if (s === 'whole block kept') return n === g && g > 0;
  if (s === 'nothing kept') return n === 0;
  if (s === 'cut by the threshold') return kept(i, t) < g;
  return true;
}
function filter() {
  const d = $('domain').selectedIndex, r = $('request').selectedIndex;
  const s = $('show').value, t = +$('threshold').value;
  rows = [];
  for (let i = 0; i < N; i++) if (passes(i, d, r, s, t)) rows.push(i);
  page = 0;
  draw();
}
function token(id, outcome) {
  const b = document.createElement('span');
  b.className = `t ${outcome}`;
  b.textContent = D.texts[id];
  return b;
}
function line(i, t) {
  const r = document.createElement('div'), h = document.createElement('span'), n = D.num_accepted[i];
  r.className = 'r';
  h.className = 'h';
  h.textContent = `${D.requests[D.request[i]]}, round ${D.round[i]}: ${n} of ${D.gamma[i]} kept`;
  r.append(h);
  const c = at('confidence', i), p = at('accept_prob', i);
  const e = at('target_entropy_bits', i), q = at('draft_entropy_bits', i);
  let a = 1;
  at('draft_ids', i).forEach((id, k) => {
    const outcome = k < n ? 'accepted' : k === n ? 'rejected' : 'discarded', b = token(id, outcome);
    const words = [`draft ${k + 1}: ${outcome}`], small = [];
    if (c.length) {
      a *= c[k] / 1000;
      words.push(`confidence ${num(c[k], 3)}`, `survival ${a.toFixed(3)}`);
      small.push(num(c[k], 2));
    }
    if (p.length) words.push(`1 - TV ${num(p[k], 3)}`);
    if (e.length) { words.push(`target ${num(e[k], 2)} bits`); small.push(`${num(e[k], 1)}b`); }
    if (q.length) words.push(`drafter ${num(q[k], 2)} bits`);
    if (c.length && a < t) { b.classList.add('cut'); words.push('cut by the threshold'); }
    const s = document.createElement('small');
    s.textContent = small.join(' ');
    b.append(s);
    b.title = words.join(', ');
    r.append(b);
  });
  if (D.next_token && D.next_token[i] >= 0) {
    const b = token(D.next_token[i], 'extra');
    b.title = n < D.gamma[i] ? 'replacement, by the target' : 'bonus, by the target';
    r.append(b);
  }
  return r;
}
function draw() {
  const t = +$('threshold').value, pages = Math.max(1, Math.ceil(rows.length / D.page));
  page = Math.min(Math.max(page, 0), pages - 1);
  $('shown').textContent = t.toFixed(2);
  $('where').textContent = `${rows.length} of ${N} rounds, page ${page + 1} of ${pages}`;
  $('rounds').replaceChildren(...rows.slice(page * D.page, (page + 1) * D.page).map(i => line(i, t)));
}
for (const id of ['domain', 'request', 'show']) $(id).addEventListener('change', filter);
$('threshold').addEventListener('input', filter);
$('back').addEventListener('click', () => { page--; draw(); });
$('on').addEventListener('click', () => { page++; draw(); });
filter();
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{style}</style></head><body>
<h1 style="font-size:18px">{title}</h1>
<p><span class="t accepted">accepted</span> <span class="t rejected">rejected</span>
<span class="t discarded">discarded behind a rejection</span> <span class="t extra">the target's own</span>
<span class="t cut">would be cut by the threshold</span>; below a token: confidence, target's entropy in bits.</p>
<form onsubmit="return false">
<label>Domain <select id="domain"></select></label> <label>Request <select id="request"></select></label>
<label>Show <select id="show"><option>all<option>rejected<option>whole block kept<option>nothing kept
<option>cut by the threshold</select></label>
<label>Threshold <input id="threshold" type="range" min="0" max="1" step="0.01" value="0">
<output id="shown"></output></label>
<button id="back" type="button">Back</button> <button id="on" type="button">On</button>
<span id="where" role="status"></span>
</form><div id="rounds"></div>
<script type="application/json" id="data">{data}</script><script>{script}</script></body></html>
"""


def write_trace_html(path: Path | str, table: TraceTable, tokenizer: Any, *, title: str = "Trace") -> Path:
    """Write the viewer of a trace, whole. Whatever the model wrote is shown as text, never interpreted."""
    data = json.dumps(_data(table, tokenizer), ensure_ascii=False, separators=(",", ":"))
    # the data must not be able to end their own element
    safe = data.replace("<", "\\u003c")
    page = _PAGE.format(title=html.escape(title), style=_STYLE, script=_SCRIPT, data=safe)
    return write_text(path, page)


def _data(table: TraceTable, tokenizer: Any) -> dict[str, Any]:
    requests, domains = list(table.requests), list(table.domains)
    request_of = {name: index for index, name in enumerate(requests)}
    domain_of = {name: index for index, name in enumerate(domains)}
    data: dict[str, Any] = {
        "page": PAGE,
        "requests": requests,
        "domains": domains,
        "request": [request_of[name] for name in table.columns["request_id"].tolist()],
        "domain": [domain_of[name] for name in table.columns["domain"].tolist()],
        "texts": {str(token): text for token, text in token_texts(tokenizer, table.token_ids()).items()},
        "start": {},
    }
    for name in ("round", "gamma", "num_accepted", "next_token"):
        if name in table.columns:
            data[name] = table.columns[name].tolist()
    for name in ("draft_ids", "confidence", "accept_prob", "target_entropy_bits", "draft_entropy_bits"):
        values, data["start"][name] = table.flat(name)
        data[name] = values.tolist() if name == "draft_ids" else np.rint(SCALE * values).astype(int).tolist()
    return data
