// The page's own script: rows into charts, tooltips, and the table. Text reaches the page by textContent alone.
const COLUMNS = [
  // name, heading, kind: "text", "count" or decimals; "long" texts are cut short with an ellipsis; main: shown by default
  ["source", "model", "long", true], ["component", "component", "long", true], ["attention", "attention", "text", true],
  ["part", "part", "text", true], ["step", "step", "count", true], ["offset", "distance", "count", true],
  ["layer", "layer", "count", true], ["head", "head", "count", true], ["mask", "mask", "text", true],
  ["symmetry", "symmetry", 4, true], ["symmetry_z", "std from random", 1, true],
  ["directionality", "directionality", 4, true], ["norm", "norm", 3, true], ["effective_rank", "effective rank", 1, true],
  ["self_norm", "own |v|", 3, true], ["self_sign", "sign of v", 2, true], ["self_share", "share of v", 3],
  ["positive_energy", "attracting share", 3, true], ["positive_directions", "attracting", "count", true],
  ["negative_directions", "repelling", "count", true], ["flags", "flags", "text", true], ["reason", "not defined", "long", true],
  ["module", "module", "long"], ["kv_head", "key head", "count"], ["shared_by", "shared by layers", "long"],
  ["row_excess", "row excess", 4], ["column_excess", "column excess", 4], ["bias_share", "bias share", 4],
  ["symmetry_a", "symmetry a", 4, true], ["symmetry_b", "symmetry b", 4, true], ["symmetry_change", "change", 4, true],
  ["null_low", "noise from", 4], ["null_high", "noise to", 4], ["symmetry_change_z", "std from noise", 1, true],
  ["directionality_a", "directionality a", 4, true], ["directionality_b", "directionality b", 4, true],
  ["directionality_change", "change of directionality", 4], ["relative_change", "relative change", 4, true], ["cosine", "cosine", 4, true],
  ["norm_a", "norm a", 3], ["norm_b", "norm b", 3], ["change_symmetry", "symmetry of change", 4, true],
  ["change_effective_rank", "effective rank of change", 1], ["d_model", "d model", "count"], ["d_head", "d head", "count"],
];
const CHUNK = 150; // rows put into the document at a time
const MANY = 12000; // marks above which a canvas draws faster than an SVG

const groups = unpack(JSON.parse(document.getElementById("data").textContent));
const all = [...groups.values()].flatMap((group) => group.rows);
const series = sliders(); // entry -> {values, at, drawn}: models that a slider goes through
if (all.length) table();
addEventListener("scroll", () => { document.getElementById("tip").hidden = true; }, { passive: true });
await charts();

function unpack(store) {
  return new Map(store.map(({ name, entry, part, shared, columns, rows }) => [
    name,
    { entry, part, rows: rows.map((row) => Object.assign({}, shared, Object.fromEntries(columns.map((c, i) => [c, row[i]])))) },
  ]));
}

// ---- charts --------------------------------------------------------------------------------------------------------

async function charts() {
  const hidden = new Set();
  let plane = null;
  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const { model } = button.dataset;
      if (!hidden.delete(model)) hidden.add(model);
      button.setAttribute("aria-pressed", String(!hidden.has(model)));
      plane?.signal("hidden", [...hidden]).runAsync();
    });
  }
  for (const box of document.querySelectorAll(".chart")) {
    const spec = JSON.parse(box.querySelector("script").textContent);
    const rows = shownRows(box.dataset.rows);
    spec.datasets = { ...spec.datasets, rows, path: wholeRows(box.dataset.rows) };
    try {
      const { view } = await window.vegaEmbed(box, spec, {
        ast: true, // expressions are interpreted: no eval, which the policy forbids
        renderer: rows.length > MANY ? "canvas" : "svg",
        actions: false,
        tooltip: showTip,
      });
      if (box.dataset.rows === "all") {
        plane = view;
        if (hidden.size) await view.signal("hidden", [...hidden]).runAsync();
      }
      box.style.minHeight = "";
      saving(box, view);
      for (const [entry, one] of series) {
        if (!entriesOf(box.dataset.rows).has(entry)) continue;
        one.drawn.push({ view, name: box.dataset.rows, fed: spec.data?.name, told: (spec.params ?? []).map((p) => p.name) });
        if (one.at !== one.start) one.move(); // the slider was moved before this chart was there
      }
    } catch (error) {
      box.replaceChildren(made("p", "failed", `This chart could not be drawn: ${error.message}`));
    }
    await new Promise((next) => setTimeout(next)); // between charts the page answers clicks
  }
  document.documentElement.dataset.ready = "true";
}

// The groups behind the name of a chart's rows: "all", "entry-2", or one group's own. Parts of a score stand alone.
function groupsOf(name) {
  if (groups.has(name)) return [groups.get(name)];
  const whole = [...groups.values()].filter((group) => !group.part);
  return name === "all" ? whole : whole.filter((group) => name === `entry-${group.entry}`);
}

function entriesOf(name) { return new Set(groupsOf(name).map((group) => group.entry)); }

function shownRows(name) {
  return groupsOf(name).flatMap(({ entry, rows }) => (series.has(entry) ? rows.filter((row) => row.stop === series.get(entry).at) : rows));
}

function wholeRows(name) {
  return groupsOf(name).flatMap(({ entry, rows }) => (series.has(entry) ? rows.filter((row) => row.head === null) : []));
}

// ---- series --------------------------------------------------------------------------------------------------------

function sliders() {
  const found = new Map();
  for (const box of document.querySelectorAll(".slider")) {
    const input = box.querySelector("input"), output = box.querySelector("output");
    const values = JSON.parse(box.dataset.values), labels = JSON.parse(box.dataset.labels);
    const one = { values, at: Number(input.value), start: Number(input.value), drawn: [], move };
    let moving = false, again = false;

    async function move() { // a slider runs ahead of its charts: they go to where it is, not through all it passed
      again = true;
      if (moving) return;
      moving = true;
      while (again) {
        again = false;
        for (const { view, name, fed, told } of [...one.drawn]) {
          if (told.includes("now")) view.signal("now", values[one.at]);
          if (told.includes("now_stop")) view.signal("now_stop", one.at);
          // copies, since a view marks the rows that it is given
          if (fed === "rows") view.data("rows", shownRows(name).map((row) => Object.fromEntries(Object.entries(row))));
          await view.runAsync();
          if (again) break;
        }
      }
      moving = false;
      box.dataset.shown = String(one.at);
    }

    function tell() {
      one.at = Number(input.value);
      input.setAttribute("aria-valuetext", `${labels[one.at]}, ${one.at + 1} of ${labels.length}`);
      output.textContent = `${labels[one.at]} · ${one.at + 1} of ${labels.length}`;
    }

    input.addEventListener("input", () => { tell(); move(); });
    tell();
    found.set(Number(box.dataset.entry), one);
  }
  return found;
}

// ---- saving --------------------------------------------------------------------------------------------------------

// Two small buttons beside the heading of a chart: what is drawn, on white, as a file.
function saving(box, view) {
  const caption = box.closest("figure").querySelector("figcaption"), title = caption.querySelector("h4");
  const called = (title ?? document.getElementById(box.getAttribute("aria-labelledby"))).textContent;
  const span = made("span", "save", "save ");
  for (const [kind, make] of [["SVG", svgOf], ["PNG", pngOf]]) {
    const button = made("button", "", kind);
    button.type = "button";
    button.setAttribute("aria-label", `save ${called} as ${kind}`);
    button.addEventListener("click", async () => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(await make(view));
      link.download = `qkform-${fileName(box, called)}.${kind.toLowerCase()}`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    });
    span.append(button);
  }
  if (title) caption.prepend(span); else caption.append(span);
}

function fileName(box, called) {
  const [entry] = entriesOf(box.dataset.rows), one = box.dataset.rows === "all" ? null : series.get(entry);
  const at = one ? `-at-${one.values[one.at]}` : "";
  return `${box.dataset.rows}-${called}${at}`.toLowerCase().replace(/[^a-z0-9-]+/g, "-").slice(0, 80);
}

async function svgOf(view) {
  const text = await view.toSVG();
  return new Blob([text.replace(/<svg[^>]*>/, '$&<rect width="100%" height="100%" fill="white"/>')], { type: "image/svg+xml" });
}

async function pngOf(view) {
  const drawn = await view.toCanvas(2), canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [drawn.width, drawn.height];
  const pen = canvas.getContext("2d");
  pen.fillStyle = "white";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(drawn, 0, 0);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

function showTip(_handler, event, _item, value) {
  const tip = document.getElementById("tip");
  tip.hidden = value === null || typeof value !== "object";
  if (tip.hidden) return;
  const list = document.createElement("dl");
  for (const [name, shown] of Object.entries(value)) {
    if (shown === null || shown === undefined || shown === "" || shown === "null") continue;
    list.append(made("dt", "", name), made("dd", "", String(shown).replace(/^-(?=\d)/, "−").slice(0, 400)));
  }
  tip.replaceChildren(list);
  const room = 8, { width, height } = tip.getBoundingClientRect();
  const right = event.clientX + 14 + width + room <= document.documentElement.clientWidth;
  const below = event.clientY + 14 + height + room <= window.innerHeight;
  const left = right ? event.clientX + 14 : event.clientX - 14 - width;
  const top = below ? event.clientY + 14 : event.clientY - 14 - height;
  tip.style.left = `${Math.max(room, Math.min(left, document.documentElement.clientWidth - width - room))}px`;
  tip.style.top = `${Math.max(room, top)}px`;
}

// ---- table ---------------------------------------------------------------------------------------------------------

function table() {
  const head = document.querySelector("#table thead tr"), body = document.querySelector("#table tbody");
  const box = document.getElementById("table-box"), only = document.getElementById("only");
  const withHeads = document.getElementById("with-heads"), withAll = document.getElementById("with-all");
  let sorted = null; // {column, down}
  let shown = [], columns = [], built = 0;

  function refresh() {
    const kept = all.filter((row) => (withHeads.checked || row.head === null) && (!only?.value || row.source === only.value));
    columns = COLUMNS.filter((column) => withAll.checked ? kept.some((row) => isThere(row[column[0]])) : wanted(column, kept));
    shown = sorted ? [...kept].sort((a, b) => compare(a[sorted.column], b[sorted.column], sorted.down)) : kept;
    head.replaceChildren(...columns.map(heading));
    body.replaceChildren();
    built = 0;
    box.scrollTop = 0;
    grow();
  }

  // By default: the main columns, without texts that are the same in every row.
  function wanted([name, , kind, main], kept) {
    if (!main || (name === "head" && !withHeads.checked)) return false;
    const told = new Set(kept.map((row) => row[name]).filter(isThere));
    return told.size > 1 || (told.size === 1 && (isNumber(kind) || name === "flags" || name === "reason"));
  }

  function heading([name, title, kind]) {
    const cell = made("th", isNumber(kind) ? "number" : "", "");
    const button = made("button", "", title);
    button.type = "button";
    button.dataset.column = name;
    cell.scope = "col";
    cell.append(button);
    cell.setAttribute("aria-sort", sorted?.column === name ? (sorted.down ? "descending" : "ascending") : "none");
    button.addEventListener("click", () => {
      sorted = { column: name, down: sorted?.column === name ? !sorted.down : false };
      refresh();
      head.querySelector(`button[data-column="${name}"]`).focus();
    });
    return cell;
  }

  function grow() {
    const piece = document.createDocumentFragment();
    for (const row of shown.slice(built, built + CHUNK)) {
      const line = document.createElement("tr");
      for (const [name, , kind] of columns) line.append(cell(row[name], kind, name));
      piece.append(line);
    }
    body.append(piece);
    built = Math.min(built + CHUNK, shown.length);
    const more = built < shown.length ? `, first ${built.toLocaleString("en")} drawn` : "";
    document.getElementById("shown").textContent = `${shown.length.toLocaleString("en")} rows${more}`;
  }

  box.addEventListener("scroll", () => {
    if (built < shown.length && box.scrollTop + box.clientHeight > box.scrollHeight - 400) grow();
  });
  for (const control of [only, withHeads, withAll]) control?.addEventListener("change", refresh);
  refresh();
}

function cell(value, kind, name) {
  if (!isThere(value)) {
    const empty = name === "head" ? "all" : isNumber(kind) ? "–" : "";
    return made("td", isNumber(kind) ? "number absent" : "absent", empty);
  }
  const made_ = made("td", isNumber(kind) ? "number" : kind === "long" ? "long" : "", written(value, kind));
  if (kind === "long") made_.title = value;
  return made_;
}

function written(value, kind) {
  if (typeof kind !== "number") return String(value);
  const size = Math.abs(value);
  const digits = size >= 1e6 || (size > 0 && size < 10 ** -kind / 2) ? value.toExponential(2) : value.toFixed(kind);
  return digits.replace("-", "−");
}

// Undefined values are last in both directions.
function compare(a, b, down) {
  if (!isThere(a) || !isThere(b)) return isThere(b) - isThere(a);
  const order = typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  return down ? -order : order;
}

function isThere(value) { return value !== null && value !== undefined && value !== ""; }
function isNumber(kind) { return kind === "count" || typeof kind === "number"; }

function made(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.textContent = text;
  return element;
}
