"use strict";
// Lists the tensors of the page. All text of the data is set as text, never as HTML.
(() => {
  const at = (id) => document.getElementById(id);
  const STEP = 100; // rows that are made at a time
  const data = JSON.parse(at("data").textContent);
  let found = [], side = null, shown = 0;

  // runs of equal differences -> the numbers
  function numbers(runs) {
    if (!runs) return null;
    let count = 0;
    for (let i = 1; i < runs.length; i += 2) count += runs[i];
    const out = new Float64Array(count);
    let value = 0, n = 0;
    for (let i = 0; i < runs.length; i += 2)
      for (let k = 0; k < runs[i + 1]; k++) out[n++] = value += runs[i];
    return out;
  }

  function unpacked(side) {
    if (side.rows) return side;
    side.rows = [];
    side.groups.forEach((group, g) => {
      const digits = group.digits.map(numbers);
      for (const name of ["layer", "expert", "file"]) group[name] = numbers(group[name]);
      for (let i = 0; i < group.count; i++) {
        let name = group.parts[0];
        for (let d = 0; d < digits.length; d++) name += digits[d][i] + group.parts[d + 1];
        side.rows.push({ name, g, i });
      }
    });
    return side;
  }

  const fileOf = (side, row) => side.files[(side.groups[row.g].file || [])[row.i]] || "-";

  function size(bytes) {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let unit = 0;
    while (bytes >= 999.5 && unit < 4) { bytes /= 1000; unit++; }
    return `${Number(bytes.toPrecision(3))} ${units[unit]}`;
  }

  // the tensors of the source of which row `row` of the target is made
  function origin(row) {
    const from = data.origins && side === data.sides[0] && data.origins[row.g];
    if (!from) return null;
    if (!from.numbers) {
      from.numbers = numbers(from.ids);
      from.counts = Array.isArray(from.each) ? numbers(from.each) : null;
    }
    const source = unpacked(data.sides[1]).rows, out = [];
    if (from.counts === null) {
      const count = data.sides[0].groups[row.g].count;
      for (let k = 0; k < from.each; k++) out.push(source[from.numbers[k * count + row.i]]);
    } else {
      let start = 0;
      for (let k = 0; k < row.i; k++) start += from.counts[k];
      for (let k = 0; k < from.counts[row.i]; k++) out.push(source[from.numbers[start + k]]);
    }
    return out;
  }

  // sets a text that may break behind a dot and a slash
  function put(element, text) {
    String(text).split(/(?<=[./])/).forEach((part, i) =>
      element.append(...(i ? [document.createElement("wbr"), part] : [part])));
    return element;
  }

  function cell(tr, text, kind) {
    const td = put(tr.appendChild(document.createElement("td")), text);
    if (kind) td.className = kind;
    return td;
  }

  function line(td, text, kind) {
    const div = put(td.appendChild(document.createElement("div")), text);
    if (kind) div.className = kind;
  }

  function more() {
    for (const end = Math.min(found.length, shown + STEP); shown < end; shown++) {
      const row = found[shown], group = side.groups[row.g], tr = document.createElement("tr");
      cell(tr, row.name);
      cell(tr, group.indexed && group.holds[0].includes("{layer}") ? group.layer[row.i] : "", "number");
      cell(tr, group.indexed && group.holds[0].includes("{expert}") ? group.expert[row.i] : "", "number");
      cell(tr, group.shape.join(" x "), "number");
      cell(tr, group.dtype);
      const bytes = cell(tr, size(group.bytes), "number");
      bytes.title = `${group.bytes} bytes`;
      cell(tr, fileOf(side, row));
      const rule = cell(tr, group.kind);
      if (group.rule) line(rule, `${group.rule} holds ${group.holds.join(", ")}`, "small");
      const from = origin(row);
      if (data.origins && side === data.sides[0]) {
        const td = cell(tr, "");
        for (const one of from.slice(0, 8)) line(td, `${one.name} in ${fileOf(data.sides[1], one)}`);
        if (from.length > 8) line(td, `and ${from.length - 8} more`);
      }
      at("rows").appendChild(tr);
    }
    at("more").hidden = shown >= found.length;
  }

  function search() {
    side = unpacked(data.sides[at("side") ? Number(at("side").value) : 0]);
    const words = at("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const fixed = side.groups.map((g) =>
      [g.dtype, g.kind, g.rule || "", ...(g.holds || [])].join(" ").toLowerCase());
    const files = side.files.map((name) => name.toLowerCase());
    found = words.length === 0 ? side.rows : side.rows.filter((row) => {
      const name = row.name.toLowerCase(), file = files[(side.groups[row.g].file || [])[row.i]] || "";
      return words.every((w) => name.includes(w) || fixed[row.g].includes(w) || file.includes(w));
    });
    const bytes = found.reduce((sum, row) => sum + side.groups[row.g].bytes, 0);
    at("found").textContent =
      `${found.length.toLocaleString("en")} of ${side.rows.length.toLocaleString("en")} tensors, ${size(bytes)}`;
    at("rows").textContent = "";
    const head = at("rows").appendChild(document.createElement("tr"));
    const names = ["name", "layer", "expert", "shape", "dtype", "bytes", "file", "rule"];
    if (data.origins && side === data.sides[0]) names.push("made of");
    for (const name of names)
      head.appendChild(document.createElement("th")).textContent = name;
    shown = 0;
    more();
  }

  let later = 0;
  const soon = () => { clearTimeout(later); later = setTimeout(search, 150); };
  const opened = () => { if (at("tensors").open && !side) search(); };
  at("tensors").addEventListener("toggle", opened);
  at("find").addEventListener("input", soon);
  if (at("side")) at("side").addEventListener("change", search);
  at("more").addEventListener("click", more);
  opened(); // a browser may keep it open when the page is loaded again
})();
