"use strict";
// The cache map: one canvas cell per block, fed by one event stream. A message carries only the blocks that
// changed; drawing happens at most once a frame, and only for cells whose look changed.

const $ = (id) => document.getElementById(id);
const map = $("map"), brush = map.getContext("2d");
const SHARED_FULL = 8, OLDEST = 600;            // owners and seconds at which a colour is at its end
const HISTORY = 300_000;                        // milliseconds shown in the chart

let pool = { num_blocks: 0, block_size: 0 };
let owners = new Uint8Array(0);                 // tables that hold the block
let cached = new Uint8Array(0);                 // 1: the prefix cache holds it
let idle = new Uint16Array(0);                  // seconds since it was last used, cached-only blocks
let requests = [], tree = [], history = [];
let cursor = -1, held = null, marked = new Set(), hovered = null;
let cell = 12, columns = 1, colours = {}, dirty = true;

const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const percent = (x) => `${(100 * x).toFixed(1)} %`;
const count = (x) => Number(x).toLocaleString("en");

// ---------------------------------------------------------------------------------------------- what comes in

function receive(message) {
  if (message.pool) {
    pool = message.pool;
    owners = new Uint8Array(pool.num_blocks);
    cached = new Uint8Array(pool.num_blocks);
    idle = new Uint16Array(pool.num_blocks);
    $("model").textContent = pool.model;
    $("pool").textContent = `${count(pool.num_blocks)} of ${pool.block_size} tokens, ${count(pool.bytes_per_block)} bytes each`;
    layout();
  }
  for (const run of message.blocks) {
    const state = bytes(run.state), ages = new Uint16Array(bytes(run.idle).buffer);
    for (let i = 0; i < state.length; i++) {
      owners[run.start + i] = state[i] & 0x7f;
      cached[run.start + i] = state[i] >> 7;
    }
    idle.set(ages, run.start);
  }
  if (message.requests) requests = message.requests;
  if (message.tree) { tree = message.tree; $("tree-note").textContent = message.tree_note || ""; }
  figures(message.stats);
  list($("requests"), requests, requestRow); $("no-requests").hidden = requests.length > 0;
  if (message.tree) { list($("tree"), tree, treeRow); $("no-tree").hidden = tree.length > 0; }
  remark(); dirty = true;
}

function figures(stats) {
  const texts = {
    running: stats.num_running, waiting: stats.num_waiting, usage: percent(stats.kv_cache_usage),
    hit_rate: stats.prefix_queries ? percent(stats.prefix_hits / stats.prefix_queries) : "-",
    hits: stats.prefix_hits, queries: stats.prefix_queries, preemptions: stats.num_preemptions,
    num_free: stats.num_free, num_cached: stats.num_cached_only, num_in_use: stats.num_in_use,
    num_shared: owners.reduce((n, o) => n + (o > 1), 0),
  };
  for (const [id, text] of Object.entries(texts)) {
    $(id).textContent = typeof text === "number" ? count(text) : text;
    $(id).dataset.value = typeof text === "number" ? text : stats[id] ?? text;
  }
  const now = Date.now(), before = history[history.length - 1];
  const asked = before ? stats.prefix_queries - before.queries : 0;
  const rate = asked > 0 ? (stats.prefix_hits - before.hits) / asked : before ? before.rate : null;
  history.push({ now, usage: stats.kv_cache_usage, queries: stats.prefix_queries, hits: stats.prefix_hits, rate });
  while (history[0].now < now - HISTORY) history.shift();
}

function connect() {
  const source = new EventSource("cache/events");
  source.onopen = () => { $("connection").textContent = "live"; };
  source.onmessage = (event) => receive(JSON.parse(event.data));
  source.onerror = () => { $("connection").textContent = "connection lost, trying again"; };
}

// ---------------------------------------------------------------------------------------------- the two lists

function list(parent, items, row) {             // rows are kept, so that focus and hover survive an update
  while (parent.children.length > items.length) parent.lastChild.remove();
  items.forEach((item, i) => {
    let button = parent.children[i]?.firstChild;
    if (!button) {
      button = document.createElement("button");
      button.type = "button";
      button.innerHTML = '<span class="name"></span><span class="note"></span><span class="bar"></span>';
      button.onmouseenter = button.onfocus = () => { hovered = button.item; remark(); };
      button.onmouseleave = button.onblur = () => { hovered = null; remark(); };
      button.onclick = () => { held = held?.key === button.item.key ? null : button.item; remark(); };
      parent.append(document.createElement("li"));
      parent.lastChild.append(button);
    }
    button.item = item;
    row(button, item);
  });
}

function requestRow(button, r) {
  const [name, note, bar] = button.children;
  name.textContent = r.id;
  name.title = r.id;
  note.textContent = `${r.status}, ${count(r.num_computed_tokens)} of ${count(r.num_tokens)} tokens, ${count(r.num_cached_tokens)} cached`;
  bar.replaceChildren(part("hit", r.num_cached_tokens / r.num_tokens),
                      part("in-use", (r.num_computed_tokens - r.num_cached_tokens) / r.num_tokens));
}

function treeRow(button, node) {
  const [name, note, bar] = button.children;
  name.style.paddingLeft = `${Math.min(node.depth, 12) * 0.8}rem`;
  name.textContent = node.text ?? `${node.digest} `;
  name.title = node.text ?? node.digest;
  note.textContent = `${count(node.num_tokens)} tokens, ${count(node.hits)} hits`;
  const most = Math.max(1, ...tree.map((n) => n.hits));
  bar.replaceChildren(part("hit", node.hits / most));
}

function part(kind, share) {
  const piece = document.createElement("i");
  piece.className = kind;
  piece.style.width = `${100 * Math.max(0, Math.min(1, share || 0))}%`;
  return piece;
}

// ---------------------------------------------------------------------------------------------- links

function remark() {                             // what is pointed at, or else held, marks its blocks and its rows
  const subject = hovered ?? held;
  const next = new Set(subject?.blocks ?? []);
  if (cursor >= 0) next.add(cursor);
  if (next.size !== marked.size || [...next].some((b) => !marked.has(b))) { marked = next; dirty = true; }
  for (const button of document.querySelectorAll(".list button")) {
    const on = button.item === subject || button.item.key === held?.key || (cursor >= 0 && button.item.blocks.includes(cursor));
    button.setAttribute("aria-pressed", String(on));
  }
}

function describe(block) {
  if (block < 0 || block >= pool.num_blocks) return "Point at a block, or move to one with the arrow keys.";
  const users = requests.filter((r) => r.blocks.includes(block)).map((r) => r.id);
  const node = tree.find((n) => n.blocks.includes(block));
  let state = "free";
  if (owners[block] > 1) state = `shared by ${owners[block]} sequences`;
  else if (owners[block] === 1) state = "in use by one sequence";
  else if (cached[block]) state = `cached only, idle for ${count(idle[block])} s`;
  if (owners[block] && cached[block]) state += ", cached";
  return `Block ${block}: ${state}.` + (users.length ? ` Requests: ${users.join(", ")}.` : "")
    + (node ? ` Prefix ${node.text ?? node.digest}: ${count(node.hits)} hits.` : "");
}

function point(block) {
  if (block === cursor) return;
  cursor = block < pool.num_blocks ? block : -1;
  $("detail").textContent = describe(cursor);
  remark();
}

map.onmousemove = (e) => point(Math.floor(e.offsetY / cell) * columns + Math.min(columns - 1, Math.floor(e.offsetX / cell)));
map.onclick = map.onmousemove;
map.onmouseleave = () => { if (document.activeElement !== map) point(-1); };
map.onkeydown = (e) => {
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -pool.num_blocks, End: pool.num_blocks }[e.key];
  if (e.key === "Escape") { held = null; point(-1); return; }
  if (e.key === "Enter") { held = requests.find((r) => r.blocks.includes(cursor)) ?? tree.find((n) => n.blocks.includes(cursor)) ?? null; remark(); return; }
  if (step === undefined) return;
  e.preventDefault();
  point(Math.max(0, Math.min(pool.num_blocks - 1, (cursor < 0 ? 0 : cursor + step))));
  map.parentElement.scrollTop = Math.max(0, Math.floor(cursor / columns) * cell - map.parentElement.clientHeight / 2);
};

// ---------------------------------------------------------------------------------------------- drawing

function layout() {
  const width = map.parentElement.clientWidth, wanted = Math.sqrt(width * innerHeight * 0.5 / Math.max(1, pool.num_blocks));
  cell = Math.max(4, Math.min(16, Math.floor(wanted)));
  columns = Math.max(1, Math.floor(width / cell));
  const ratio = devicePixelRatio || 1, height = Math.ceil(pool.num_blocks / columns) * cell;
  map.width = width * ratio; map.height = height * ratio;
  map.style.height = `${height}px`;
  brush.setTransform(ratio, 0, 0, ratio, 0, 0);
  const style = getComputedStyle(document.documentElement);
  for (const name of ["free", "cached", "in-use", "shared", "hit", "mark", "panel", "line"]) colours[name] = style.getPropertyValue(`--${name}`).trim();
  drawn = new Int32Array(pool.num_blocks).fill(-1);
  dirty = true;
}

let drawn = new Int32Array(0);                  // the look that each cell has on the canvas now
function look(b) {                              // a small number: kind and shade, and whether it is marked
  const mark = marked.has(b) ? 4096 : 0;
  if (owners[b] > 1) return mark + 300 + Math.min(SHARED_FULL, owners[b]);
  if (owners[b] === 1) return mark + 200;
  if (cached[b]) return mark + 100 + Math.round(9 * Math.min(1, Math.log1p(idle[b]) / Math.log1p(OLDEST)));
  return mark;
}

function paint(b, kind) {
  const x = (b % columns) * cell, y = Math.floor(b / columns) * cell, gap = cell > 5 ? 1 : 0.5;
  const plain = kind & 4095;
  brush.globalAlpha = 1;
  brush.fillStyle = colours.panel;
  brush.fillRect(x, y, cell, cell);
  if (kind & 4096) { brush.fillStyle = colours.mark; brush.fillRect(x, y, cell, cell); }
  const inset = kind & 4096 ? Math.max(1, cell / 5) : gap / 2;
  if (plain >= 300) { brush.fillStyle = colours.shared; brush.globalAlpha = 0.6 + 0.4 * (plain - 300) / SHARED_FULL; }
  else if (plain >= 200) brush.fillStyle = colours["in-use"];
  else if (plain >= 100) { brush.fillStyle = colours.cached; brush.globalAlpha = 1 - 0.6 * (plain - 100) / 9; }
  else brush.fillStyle = colours.free;
  brush.fillRect(x + inset, y + inset, cell - 2 * inset, cell - 2 * inset);
  brush.globalAlpha = 1;
}

function chart() {
  const canvas = $("chart"), ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = 72, pen = canvas.getContext("2d");
  if (canvas.width !== width * ratio) { canvas.width = width * ratio; canvas.height = height * ratio; }
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.strokeStyle = colours.line;
  pen.lineWidth = 1;
  for (const share of [0, 0.5, 1]) {
    const y = Math.round(2 + (height - 4) * (1 - share)) - 0.5;
    pen.strokeRect(-1, y, width + 2, 0);
  }
  const now = Date.now(), span = Math.min(HISTORY, Math.max(20_000, now - (history[0]?.now ?? now)));
  for (const [name, colour] of [["usage", "in-use"], ["rate", "hit"]]) {
    pen.beginPath();
    let begun = false;
    for (const h of history) {
      if (h[name] === null) continue;
      const x = width - (now - h.now) / span * width, y = 2 + (height - 4) * (1 - h[name]);
      begun ? pen.lineTo(x, y) : pen.moveTo(x, y);
      begun = true;
    }
    pen.strokeStyle = colours[colour];
    pen.lineWidth = 1.5;
    pen.stroke();
  }
}

function frame() {
  if (dirty) {
    dirty = false;
    for (let b = 0; b < pool.num_blocks; b++) {
      const kind = look(b);
      if (kind !== drawn[b]) { drawn[b] = kind; paint(b, kind); }
    }
    chart();
    if (cursor >= 0) $("detail").textContent = describe(cursor);
  }
  requestAnimationFrame(frame);
}

addEventListener("resize", layout);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", layout);
connect();
requestAnimationFrame(frame);
