"use strict";
// Draws a report from the JSON beside it. Texts become text nodes, never markup; styles are classes, never attributes.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SCALE = data.scale;
  const spoken = document.getElementById("spoken");

  // -- elements ------------------------------------------------------------------------------------------------------

  const filled = (made, attributes, children) => {
    for (const [name, value] of Object.entries(attributes)) {
      if (value === undefined || value === null || value === false) continue;
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
    return made;
  };
  const el = (name, attributes = {}, ...children) => filled(document.createElement(name), attributes, children);
  const draw = (name, attributes = {}, ...children) =>
    filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

  function section(id, title, ...children) {
    const made = el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), ...children);
    document.getElementById("views").append(made);
    document.getElementById("contents").lastElementChild.before(el("a", { href: `#${id}` }, title)); // the summary is the last
    return made;
  }

  function table(caption, heads, rows, { numbers = [] } = {}) {
    const align = (place) => (numbers.includes(place) ? "number" : null);
    return el("table", {},
      caption && el("caption", {}, caption),
      el("thead", {}, el("tr", {}, heads.map((head, place) => el("th", { scope: "col", class: align(place) }, head)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, place) =>
        place === 0 ? el("th", { scope: "row", class: align(0) }, cell) : el("td", { class: align(place) }, cell))))));
  }

  function choice(label, options, change, chosen = 0) {
    const select = el("select", { onchange: () => change(Number(select.value)) },
      options.map((text, place) => el("option", { value: place, selected: place === chosen }, text)));
    return el("label", {}, `${label} `, select);
  }

  let groups = 0;
  function radios(legend, options, change) {
    const name = `group-${(groups += 1)}`;
    return el("fieldset", {}, el("legend", {}, legend), options.map(([value, text], place) =>
      el("label", {}, el("input", { type: "radio", name, checked: place === 0, onchange: () => change(value) }), ` ${text}`)));
  }

  const checkbox = (label, change, checked = false) =>
    el("label", {}, el("input", { type: "checkbox", checked, onchange: (event) => change(event.target.checked) }), ` ${label}`);

  // -- words and numbers ---------------------------------------------------------------------------------------------

  const code = (letter) => `‹U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`;
  const visible = (text) => text
    .replace(/\r\n|\r|\n/g, "↵\n")
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, (letter) => String.fromCharCode(0x2400 + letter.charCodeAt(0)))
    .replace(/[\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, code);
  const spelled = new Map(data.vocabulary.filter(([, text]) => text !== "" && text !== "\ufffd"));
  const nameless = (id) => (spelled.has(id) ? visible(spelled.get(id)) : `‹id ${id}›`); // such as </s>
  const quoted = (id, text) => (text === "" ? nameless(id) : `“${visible(text).replaceAll("\n", "")}”`);
  const brief = (text, most) => {
    const letters = [...visible(text).replaceAll("\n", "")];
    return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : letters.join("");
  };
  const number = (value, digits = 3) =>
    value === null || value === undefined || !Number.isFinite(value) ? "–"
      : (Math.abs(value) < 0.5 * 10 ** -digits ? 0 : value).toFixed(digits);
  const percent = (logprob) => {
    const share = 100 * Math.exp(Math.min(logprob, 0));
    return share >= 99.95 ? "100%" : share >= 9.95 ? `${share.toFixed(1)}%` : share >= 0.01 ? `${share.toFixed(2)}%` : "<0.01%";
  };
  const counted = (many, one, more) => `${many.toLocaleString("en")} ${many === 1 ? one : more || `${one}s`}`;
  const ending = (end) => ({ eos: "ended by itself", length: "cut at max_new_tokens", context: `cut at the ${end.cause || "context"}`, stop: `stopped by ${end.cause || "a criterion"}`,
    time: "cut by the time limit", interrupted: "interrupted", unfinished: "unfinished", scored: "scored" })[end.reason] || end.reason;
  const nameOf = (lane) => (lane.run !== undefined ? [lane.run, lane.id, ...(lane.seed === null ? [] : [`seed ${lane.seed}`])].join(" · ")
    : lane.place ? `prompt ${lane.place}` : lane.lane);

  // -- trees ---------------------------------------------------------------------------------------------------------

  const named = new Map(data.lanes.map((lane) => [lane.lane, lane]));
  const laneOf = (name) => named.get(name) || { sequences: [] }; // beyond the list there is nothing of it
  const opened = new Map();
  function treeOf(place) {
    if (opened.has(place)) return opened.get(place);
    const packed = data.lanes[place].tree;
    if (!packed) return null;
    const nodes = [{ number: 0, parent: null, children: [], depth: 0, total: 0, state: "root", text: "", id: null }];
    packed.up.forEach((up, at) => {
      const parent = nodes[at + 1 - up];
      const known = packed.token[at] < 0 ? null : data.vocabulary[packed.token[at]];
      const logprob = packed.logprob[at] === null ? -Infinity : packed.logprob[at] / SCALE;
      const rank = packed.rank ? packed.rank[at] || null : null;
      const node = {
        number: at + 1, parent, children: [], depth: parent.depth + (known ? 1 : 0), logprob, rank,
        id: known && known[0], text: known ? known[1] : "", state: packed.state[at],
        total: parent.total + logprob + (packed.extra ? packed.extra[at] / SCALE : 0),
        entropy: packed.entropy && (rank || packed.entropy[at]) ? packed.entropy[at] / SCALE : null,
        note: packed.note && packed.note[at + 1], trace: packed.trace && packed.trace[at + 1],
        top: pairs(packed.top && packed.top[at + 1], 2), watched: pairs(packed.watched && packed.watched[at + 1], 3),
      };
      parent.children.push(node);
      nodes.push(node);
    });
    const ends = packed.ends.map((end) => ({ ...end, at: nodes[end.node] }));
    if (!ends.length) {
      for (const node of nodes) if (node.state === "v" || node.state === "l") ends.push({ at: node, reason: "unfinished", tokens: node.depth });
    }
    ends.sort((one, other) => (one.place || 1e9) - (other.place || 1e9) || (other.score || 0) - (one.score || 0));
    for (const end of ends) Object.assign(end.at, { end, total: typeof end.total === "number" ? end.total : end.at.total });
    for (const node of nodes) Object.assign(node, { last: node.depth, first: node.end ? node.depth : Infinity, best: (node.end && node.end.place) || 1e9 });
    for (const node of nodes.slice(1).reverse()) {
      const parent = node.parent;
      parent.last = Math.max(parent.last, node.last);
      parent.first = Math.min(parent.first, node.first);
      parent.best = Math.min(parent.best, node.best);
    }
    const tree = { nodes, ends, lane: data.lanes[place] };
    opened.set(place, tree);
    return tree;
  }

  function pairs(flat, width) {
    if (!flat) return [];
    const made = [];
    for (let at = 0; at < flat.length; at += width) {
      const [id, text] = data.vocabulary[flat[at]];
      made.push({ id, text, logprob: flat[at + 1] === null ? -Infinity : flat[at + 1] / SCALE, rank: flat[at + 2] });
    }
    return made;
  }

  function pathTo(node) {
    const path = [];
    for (let at = node; at.parent; at = at.parent) if (at.id !== null) path.push(at);
    return path.reverse();
  }

  function formula(lane, node, end) {
    const tokens = end ? end.tokens : node.depth;
    const total = end && end.total !== undefined ? end.total : node.total;
    const penalty = lane.length_penalty === undefined ? 1 : lane.length_penalty;
    const score = end && end.score !== undefined ? end.score : total / Math.max(tokens, 1) ** penalty;
    return `score = total / tokens ** length_penalty = ${number(total)} / ${tokens} ** ${penalty} = ${number(score)}`;
  }

  // -- one token -----------------------------------------------------------------------------------------------------

  const gap = (token) => {
    const other = token.top.find((one) => one.id !== token.id);
    return other ? token.logprob - other.logprob : null;
  };
  const level = (value, bounds) => bounds.filter((bound) => value >= bound).length;
  const MEASURES = {
    probability: (token) => Math.min(9, Math.floor(10 * (1 - Math.exp(Math.min(token.logprob, 0))) * 0.999)),
    "log-probability": (token) => level(-token.logprob, [0.1, 0.35, 0.7, 1.2, 1.8, 2.5, 3.5, 5, 7]),
    rank: (token) => (token.rank ? level(token.rank, [2, 3, 4, 6, 11, 21, 51, 201, 1001]) : 0),
    entropy: (token) => level(token.entropy || 0, [0.1, 0.35, 0.7, 1.2, 1.8, 2.5, 3.5, 4.5, 6]),
    gap: (token) => (gap(token) === null ? 0 : level(-gap(token), [-3, -1.5, -0.7, -0.3, 0, 0.5, 1, 2, 4])),
  };
  const DIGITS = { probability: (token) => Math.min(9, Math.floor(10 * Math.exp(Math.min(token.logprob, 0)))) };
  const sentence = (token, place) => `token ${place + 1}: ${quoted(token.id, token.text)}, probability ${percent(token.logprob)}`
    + (token.rank ? `, rank ${token.rank}` : "");

  // Each processor has a line for its name and one for its numbers, which fits the panel.
  function processors(rows) {
    const heads = ["before", "after", "removed", "moved", "new first"];
    return el("table", { class: "narrow" }, el("caption", {}, "What each processor did"),
      el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col", class: "number" }, head)))),
      rows.map(([name, ...cells]) => el("tbody", {}, el("tr", {}, el("th", { scope: "rowgroup", colspan: heads.length }, name)),
        el("tr", {}, cells.map((cell) => el("td", { class: "number" }, cell))))));
  }

  function details(token, place) {
    const facts = [["probability", percent(token.logprob)], ["log-probability", `${number(token.logprob)} nats`]];
    if (token.rank) facts.push(["rank", token.rank.toLocaleString("en")]);
    if (token.entropy !== null) facts.push(["entropy", `${number(token.entropy)} nats`]);
    if (gap(token) !== null) facts.push(["gap to the runner-up", `${number(gap(token))} nats`]);
    const parts = [
      el("h3", {}, `Token ${place + 1}: `, el("span", { class: "mono" }, quoted(token.id, token.text)), token.text === "" ? "" : ` (id ${token.id})`),
      el("dl", {}, facts.map(([label, value]) => el("div", {}, el("dt", {}, label), el("dd", {}, value)))),
    ];
    const words = (one) => [el("span", { class: "mono" }, quoted(one.id, one.text)), percent(one.logprob), number(one.logprob)];
    if (token.top.length) parts.push(table("Most probable tokens", ["token", "probability", "nats"], token.top.map(words), { numbers: [1, 2] }));
    if (token.watched.length) {
      parts.push(table("Watched tokens", ["token", "probability", "nats", "rank"],
        token.watched.map((one) => [...words(one), String(one.rank)]), { numbers: [1, 2, 3] }));
    }
    if (token.trace) {
      const rows = token.trace.map(([name, removed, moved, changed, before, after]) => [name, `${(100 * before).toFixed(2)}%`,
        `${(100 * after).toFixed(2)}%`, removed.toLocaleString("en"), number(moved), changed ? "yes" : "no"]);
      parts.push(processors(rows), el("p", { class: "note" }, "Before and after: the probability of this token. Moved: total variation."));
    }
    if (token.note) parts.push(el("p", { class: "note" }, token.note));
    return parts;
  }

  // Tokens in a row. One of them takes part in the tab order; the arrow keys, Home and End go on from there.
  function strip(path, label, { open = () => {}, parting = -1 } = {}) {
    const places = path.map((token, place) => el("span", {
      class: `token${place === parting ? " parts" : ""}`, role: "button", tabindex: place === 0 ? 0 : -1, "data-place": place,
    }, token.text === "" ? nameless(token.id) : visible(token.text), el("sub", { class: "digit", "aria-hidden": "true" })));
    let chosen = 0;
    const show = (place, focus) => {
      if (!places.length) return;
      places[chosen].classList.remove("is-open");
      places[chosen].tabIndex = -1;
      chosen = Math.max(0, Math.min(place, places.length - 1));
      places[chosen].classList.add("is-open");
      places[chosen].tabIndex = 0;
      if (focus) places[chosen].focus();
      open(path[chosen], chosen, focus);
      if (focus) places[chosen].scrollIntoView({ block: "nearest" }); // above the panel, if that lies on the text
    };
    const placeOf = (event) => {
      const token = event.target.closest(".token");
      return token ? Number(token.dataset.place) : null;
    };
    const pointed = (event) => { if (placeOf(event) !== null) show(placeOf(event), event.type === "click"); };
    const keys = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    const element = el("div", { class: "strip", role: "group", "aria-label": label, onclick: pointed, onmouseover: pointed, onfocusin: (event) => {
      if (placeOf(event) !== null && placeOf(event) !== chosen) show(placeOf(event), false);
    }, onkeydown: (event) => {
      if (!(event.key in keys)) return;
      event.preventDefault();
      show(chosen + keys[event.key], true);
    } }, places.length ? places : el("span", { class: "note" }, "(no tokens)"));
    const colour = (measure) => places.forEach((place, at) => {
      const found = MEASURES[measure](path[at]);
      place.className = place.className.replace(/ ?\bh\d\b/, "") + ` h${found}`;
      place.lastChild.textContent = (DIGITS[measure] || MEASURES[measure])(path[at]);
      place.setAttribute("aria-label", sentence(path[at], at));
    });
    colour("probability");
    return { element, show, colour, places };
  }

  // The width of a chart: that of its column, which has the panel of a token beside it where there is room.
  const column = (beside) => {
    const all = document.getElementById("views").clientWidth;
    return beside && window.innerWidth > 60 * 16 ? all - 23 * 16 - 1.25 * 16 - 1 : all;
  };

  // Lines over the tokens. `series`: [class, label, values]; null leaves a hole.
  function curves(title, path, series, pick) {
    const wide = Math.max(column(true), Math.min(path.length * 2, 6000)), high = 170, left = 44, bottom = 22, above = 22;
    const values = series.flatMap(([, , list]) => list).filter((value) => value !== null && Number.isFinite(value));
    if (!values.length || path.length < 2) return null;
    const low = Math.min(0, ...values.slice(0, 1), values.reduce((a, b) => Math.min(a, b))), top = values.reduce((a, b) => Math.max(a, b), 0);
    const x = (at) => left + (at / (path.length - 1)) * (wide - left - 10);
    const y = (value) => above + (1 - (value - low) / (top - low || 1)) * (high - bottom - above);
    const line = (list) => {
      let pen = "M", made = "";
      list.forEach((value, at) => {
        if (value === null || !Number.isFinite(value)) { pen = "M"; return; }
        made += `${pen}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
        pen = "L";
      });
      return made;
    };
    // The tokens that stand out are named where they are, as far as their names do not meet.
    const names = () => {
      const list = series[0][2], room = [];
      const places = path.map((_, at) => at).filter((at) => list[at] !== null && Number.isFinite(list[at])).sort((a, b) => Math.abs(list[b]) - Math.abs(list[a]));
      return places.slice(0, 12).flatMap((at) => {
        const words = brief(path[at].text === "" ? nameless(path[at].id) : path[at].text.trim() || "·", 12), half = 4 * words.length + 4;
        const middle = Math.min(Math.max(x(at), left + half), wide - 10 - half);
        if (room.length >= 6 || room.some(([from, to]) => middle + half > from && middle - half < to)) return [];
        room.push([middle - half, middle + half]);
        const below = list[at] < 0;
        return [draw("circle", { class: "dot", cx: x(at), cy: y(list[at]), r: 2.5 }),
          draw("text", { x: middle, y: below ? Math.min(y(list[at]) + 14, high - bottom - 2) : y(list[at]) - 6, "text-anchor": "middle" }, words)];
      });
    };
    const marks = [low, (low + top) / 2, top].map((value) => [
      draw("line", { class: "axis", x1: left, x2: wide - 10, y1: y(value), y2: y(value) }),
      draw("text", { class: "soft", x: left - 6, y: y(value) + 4, "text-anchor": "end" }, number(value, 1)),
    ]);
    const picture = draw("svg", { width: wide, height: high, role: "img", "aria-label": title,
      onclick: (event) => pick(Math.round(((event.offsetX - left) / (wide - left - 10)) * (path.length - 1))) }, marks,
      series.map(([kind, , list]) => draw("path", { class: kind, d: line(list) })), names(),
      [0, path.length - 1].map((at) => draw("text", { class: "soft", x: x(at), y: high - 6, "text-anchor": at ? "end" : "start" }, `token ${at + 1}`)));
    const key = el("span", { class: "key note" }, series.map(([kind, label]) => [el("i", { class: kind === "two" ? "dashed" : null }), label]));
    return el("figure", { class: "wide" }, el("figcaption", {}, `${title} `, key), picture);
  }

  // -- sections ------------------------------------------------------------------------------------------------------

  let showLane = () => {};

  function tokensSection() {
    const lanes = data.lanes.map((lane, place) => place).filter((place) => data.lanes[place].prompt !== undefined || data.lanes[place].error);
    if (!lanes.length) return;
    const body = el("div"), picker = el("div", { class: "controls" });
    const made = section("tokens", "Tokens", picker, body);
    let current = -1;
    const show = (place, sequence = 0) => {
      current = place;
      const lane = data.lanes[place], tree = treeOf(place);
      const pickers = [];
      if (lanes.length > 1) {
        pickers.push(choice("Prompt", lanes.map((at) => `${nameOf(data.lanes[at])}: ${brief(data.lanes[at].prompt || "", 40)}`),
          (at) => show(lanes[at]), lanes.indexOf(place)));
      }
      if (tree && tree.ends.length > 1) {
        pickers.push(choice("Sequence", tree.ends.map((end, at) => (end.place ? `${end.place}` : `${at + 1}, not returned`)
          + (end.score === undefined ? "" : ` · score ${number(end.score)}`) + ` · ${ending(end)}`), (at) => show(place, at), sequence));
      }
      picker.replaceChildren(...pickers);
      body.replaceChildren(...oneLane(lane, tree, tree && tree.ends[sequence], (at) => show(place, at)));
      if (drawTree) drawTree(place);
    };
    const drawTree = treeSection();
    showLane = (place) => { show(place); made.scrollIntoView(); picker.querySelector("select")?.focus(); };
    show(lanes[0]);
    return () => current;
  }

  // All sequences of a lane, each from where it leaves the one above it with which it shares most.
  function nbest(tree, open) {
    const paths = tree.ends.slice(0, LISTED).map((end) => pathTo(end.at));
    const shared = (one, other) => { let at = 0; while (at < one.length && at < other.length && one[at].id === other[at].id) at += 1; return at; };
    const rows = paths.map((path, place) => {
      const others = place ? paths.slice(0, place) : paths.slice(1);
      const nearest = others.reduce((best, other) => (shared(path, other) > shared(path, best) ? other : best));
      const most = shared(path, nearest), end = tree.ends[place];
      let from = most; // back to the beginning of the word
      while (from && from < path.length && !/^\s/.test(path[from].text)) from -= 1;
      const rest = visible(path.slice(from).map((one) => one.text).join("")).replaceAll("\n", "").trim();
      const words = rest || (most === nearest.length ? "(the same text)" : "(ends here)");
      return [el("button", { type: "button", onclick: () => open(place), "aria-label": `show sequence ${place + 1}` }, `${end.place ? "★" : "○"} ${place + 1}`),
        place && most ? `+${most}` : "", `${from ? "…" : ""}${brief(words, 120)}`, number(end.score), number(end.logprob), String(end.tokens), ending(end)];
    });
    const left = tree.ends.length - paths.length;
    return el("div", { class: "scroll nbest" }, table("Sequences: +n tokens are shared with the nearest one above; ★ is returned",
      ["", "shared", "text", "score", "log-probability", "tokens", "ended"], rows, { numbers: [1, 3, 4, 5] }),
    left > 0 && el("p", { class: "note" }, `… and ${left} more`));
  }

  const columnsOf = (input) => Object.entries(input).map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`).join(" · ");

  function oneLane(lane, tree, end, open) {
    const parts = [];
    if (lane.prompt) parts.push(el("p", { class: "prompt", "aria-label": "Prompt" }, visible(lane.prompt)));
    if (lane.input) parts.push(el("p", { class: "note", "aria-label": "Columns of the row" }, visible(columnsOf(lane.input))));
    if (lane.error) parts.push(el("p", { class: "failed" }, `${lane.error.code}: ${lane.error.message}`));
    if (!end) {
      for (const one of lane.sequences || []) parts.push(el("p", { class: "text" }, visible(one.text)));
      if (!lane.error && (lane.sequences || []).length) parts.push(el("p", { class: "note" }, "The tokens of this prompt are not on this page."));
      return parts;
    }
    if (tree.ends.length > 1) parts.push(nbest(tree, open));
    const path = pathTo(end.at);
    const panel = el("aside", { class: "panel", "aria-label": "The chosen token" });
    const row = strip(path, "Tokens, coloured; arrow keys move", { open: (token, place, focus) => {
      panel.classList.toggle("is-chosen", focus);
      panel.replaceChildren(...details(token, place));
      spoken.textContent = sentence(token, place);
    } });
    const has = { probability: true, "log-probability": true, rank: path.some((one) => one.rank),
      entropy: path.some((one) => one.entropy !== null), gap: path.some((one) => gap(one) !== null) };
    const measures = Object.keys(has).filter((name) => has[name]).map((name) => [name, name === "gap" ? "gap to the runner-up" : name]);
    const legend = el("span", { class: "legend" }, "likely", [0, 3, 6, 9].map((at) => el("span", { class: `h${at}` }, "abc")), "surprising");
    parts.push(el("div", { class: "controls" }, radios("Colour by", measures, row.colour),
      checkbox("digits", (on) => row.element.classList.toggle("digits", on)), legend));
    const least = path.map((token, place) => ({ token, place })).filter(({ token }) => Math.exp(token.logprob) < 0.99)
      .sort((one, other) => one.token.logprob - other.token.logprob).slice(0, 12);
    const runner = path.map((token) => { const other = token.top.find((one) => one.id !== token.id); return other ? other.logprob : null; });
    parts.push(el("div", { class: "beside" }, el("div", {}, row.element,
      el("p", { class: "note" }, [counted(end.tokens, "token"), end.logprob === undefined ? null : `log-probability ${number(end.logprob)} nats`, ending(end),
        ...(end.unmet || []).map((word) => `lacks ${word}`), end.incomplete && `${end.incomplete}: incomplete`,
        ...Object.entries(lane.figures || {}).map(([name, value]) => `${name} ${value}`.trim())].filter(Boolean).join(" · ")),
      least.length > 0 && el("h3", {}, "Least certain"),
      least.length > 0 && el("ol", { class: "least" }, least.map(({ token, place }) => el("li", {}, el("button", { type: "button", onclick: () => row.show(place, true) },
        el("span", { class: "mono" }, quoted(token.id, brief(token.text, 18))), ` ${percent(token.logprob)}`)))),
      has.entropy && curves("Entropy of each step, in nats", path, [["one", "entropy", path.map((one) => one.entropy)]], (at) => row.show(at, true)),
      curves("Log-probability of each step, in nats", path, [["one", "chosen token", path.map((one) => one.logprob)],
        ...(has.gap ? [["two", "runner-up", runner]] : [])], (at) => row.show(at, true))), panel));
    if (path.length) row.show(0, false);
    return parts;
  }

  const LISTED = 40; // rows of a table of sequences
  const WIDE = 86, HIGH = 48, TALL = 38; // of a node's place in the search tree, and its height
  const RECENT = 60; // steps of which all dead branches are drawn
  const LONGEST = 5; // tokens in a row without a fork; more of them are folded
  const STATES = { i: "continued", r: "returned", f: "finished, not returned", d: "died", l: "left when the search ended", v: "live" };

  function treeSection() {
    const searching = data.lanes.some((lane) => lane.tree && (/beam|explore/.test(lane.strategy || "") || /d/.test(lane.tree.state)));
    if (!searching) return null;
    const canvas = el("div", { class: "wide pane" }), facts = el("div", { class: "panel", role: "status" });
    const slider = el("input", { type: "range", min: 1, value: 1, "aria-label": "Step", oninput: () => redraw() });
    const said = el("output");
    let tree = null, dead = false, unfolded = new Set(), chains = new Set(), chosen = null;
    const made = section("search", "Search tree", el("div", { class: "controls" }, el("label", {}, "Step ", slider, " ", said),
      checkbox("dead branches", (on) => { dead = on; unfolded = new Set(); redraw(); })), canvas,
      el("p", { class: "note" }, "Each token has the score up to it and, after #, its rank among all tokens of its step. ★ is returned, ○ ended and is not."), facts);
    const alive = (node, step) => node.last >= step || node.first <= step;
    const order = (one, other) => one.best - other.best || other.total - one.total || one.number - other.number;

    function redraw(focus) {
      const step = Number(slider.value);
      said.textContent = `${step} of ${slider.max}`;
      const onPath = new Set();
      for (let at = chosen; at; at = at.parent) onPath.add(at);
      const drawn = new Map(), edges = [], shapes = [], folded = [];
      let rows = 0, right = 0;
      const shownOf = (node) => node.children.filter((child) => child.id !== null && child.depth <= step).sort(order);
      const keptOf = (node) => shownOf(node).filter((child) => (dead && child.depth > step - RECENT) || alive(child, step) || unfolded.has(node.number));
      // The chain that begins with a node: all that follow one another without a fork or an end.
      const chainOf = (node) => {
        const chain = [node];
        for (let last = node; !last.end && keptOf(last).length === 1; chain.push(last)) [last] = keptOf(last);
        return chain;
      };
      const place = (node, x, from) => {
        drawn.set(node, { x, y: 0, from });
        right = Math.max(right, x + WIDE);
      };
      const follow = (node, x, from) => { // places a chain and what follows it; returns its row
        const chain = chainOf(node), last = chain[chain.length - 1], parts = [];
        const fold = chain.length > LONGEST && !chains.has(node.number);
        if (fold) {
          const hidden = chain.slice(node.depth === 1 ? 0 : 1, -1);
          if (node.depth > 1) parts.push(node);
          parts.push({ hidden, first: node }, last);
        } else parts.push(...chain);
        let before = from, at = x;
        for (const part of parts) {
          place(part, at, before);
          at += part.hidden ? 2.4 * WIDE : WIDE;
          before = part;
        }
        const kept = keptOf(last), lines = kept.map((child) => follow(child, at, last));
        const y = lines.length ? lines[0] : rows++;
        for (const part of parts) {
          const out = part.hidden ? 0 : shownOf(part).length - keptOf(part).length;
          if (out) folded.push([part, out]);
        }
        for (const part of parts) drawn.get(part).y = y * HIGH + 8;
        return y;
      };
      const starts = keptOf(tree.nodes[0]);
      const root = { root: true };
      place(root, 8, null);
      const lines = starts.map((child) => follow(child, 8 + WIDE, root));
      drawn.get(root).y = (lines.length ? lines[0] : 0) * HIGH + 8;
      if (!lines.length) rows = 1;
      if (shownOf(tree.nodes[0]).length > starts.length) folded.push([root, shownOf(tree.nodes[0]).length - starts.length]);
      for (const [part, { x, y, from }] of drawn) {
        const node = part.hidden ? part.hidden[0] : part.root ? tree.nodes[0] : part;
        const gone = !part.root && (node.state === "d" || !alive(node, step));
        const kinds = `${onPath.has(node) ? " on-path" : ""}${gone ? " dead" : ""}`;
        const before = from && drawn.get(from);
        if (before) {
          const start = before.x + (from.hidden ? 2.4 * WIDE : WIDE) - 14;
          edges.push(draw("path", { class: `edge${kinds}`, d: `M${start} ${before.y + TALL / 2}C${x - 4} ${before.y + TALL / 2} ${x - 10} ${y + TALL / 2} ${x} ${y + TALL / 2}` }));
        }
        if (part.root) {
          shapes.push(draw("g", { class: "root" }, draw("text", { x: x + 5, y: y + 23 }, "prompt ▸")));
          continue;
        }
        if (part.hidden) {
          const died = part.hidden.reduce((sum, one) => sum + shownOf(one).length - 1, 0);
          const words = `${counted(part.hidden.length, "token")}${part.first.depth === 1 ? " that all share" : ""}`;
          right = Math.max(right, x + 2.4 * WIDE);
          shapes.push(draw("g", { class: `node folded${kinds}`, role: "button", tabindex: -1, "data-chain": part.first.number, "aria-label": `show ${words}` },
            draw("rect", { class: "h0", x, y, width: 2.4 * WIDE - 14, height: TALL }),
            draw("text", { x: x + 6, y: y + 16 }, words),
            draw("text", { class: "soft", x: x + 6, y: y + 31 }, `${died ? `(+${died}) ` : ""}${brief(part.hidden.map((one) => one.text).join("").trim(), died ? 18 : 24)}`)));
          continue;
        }
        const mark = node.end ? (node.end.place ? `★${node.end.place} ` : "○ ") : "";
        const penalty = tree.lane.length_penalty === undefined ? 1 : tree.lane.length_penalty;
        const score = node.end && typeof node.end.score === "number" ? node.end.score : node.total / Math.max(node.depth, 1) ** penalty;
        const figures = `${number(score, 2)}${node.rank ? ` #${node.rank}` : ""}`;
        shapes.push(draw("g", { class: `node${kinds}${node === chosen ? " is-open" : ""}`, role: "button", tabindex: node === chosen || (!chosen && !shapes.some((shape) => shape.dataset.node)) ? 0 : -1,
          "data-node": node.number, "aria-label": `step ${node.depth}: ${quoted(node.id, node.text)}, total ${number(node.total)}, score ${number(score)}${node.rank ? `, rank ${node.rank}` : ""}, ${STATES[node.state] || ""}` },
          draw("rect", { class: `h${Math.min(5, MEASURES.probability(node))}`, x, y, width: WIDE - 14, height: TALL }),
          draw("text", { x: x + 5, y: y + 16 }, mark + brief(node.text === "" ? nameless(node.id) : node.text.replace(/^ /, "·"), mark ? 7 : 10)),
          draw("text", { class: "figures", x: x + 5, y: y + 31 }, brief(figures, 11))));
      }
      for (const [node, many] of folded) {
        const at = drawn.get(node);
        shapes.push(draw("g", { class: "node dead", role: "button", tabindex: -1, "data-unfold": node.root ? 0 : node.number, "aria-label": `show ${counted(many, "dead branch", "dead branches")}` },
          draw("text", { x: at.x + WIDE - 12, y: at.y + TALL + 8, "text-anchor": "end" }, `+${many}`)));
      }
      const picture = draw("svg", { width: right + 10, height: Math.max(rows, 1) * HIGH + 24, role: "group",
        "aria-label": "Search tree; arrow keys move between tokens" }, edges, shapes);
      canvas.replaceChildren(picture);
      fit(picture);
      const target = focus && picture.querySelector(`[data-node="${focus.number}"]`);
      if (target) target.focus();
      describe();
    }

    // Shortens what is wider than its box: letters of many scripts are wider than those that `brief` counts on.
    function fit(picture) {
      const lines = [...picture.querySelectorAll(".node rect ~ text")];
      const widths = lines.map((line) => line.getComputedTextLength());
      lines.forEach((line, at) => {
        const room = line.parentNode.querySelector("rect").width.baseVal.value - 10;
        if (widths[at] <= room) return;
        const letters = [...line.textContent];
        let kept = Math.floor((letters.length * room) / widths[at]);
        do line.textContent = `${letters.slice(0, kept).join("")}…`; while (line.getComputedTextLength() > room && (kept -= 1) > 0);
      });
    }

    function describe() {
      if (!chosen) { facts.replaceChildren("Choose a token to see its path."); return; }
      const path = pathTo(chosen), exact = chosen.end && chosen.end.logprob;
      const logprob = typeof exact === "number" ? exact : path.reduce((sum, one) => sum + one.logprob, 0);
      facts.replaceChildren(el("p", { class: "text" }, visible(path.map((one) => one.text).join(""))),
        el("p", {}, `${chosen.end ? ending(chosen.end) : STATES[chosen.state] || ""} · ${counted(path.length, "token")} · log-probability ${number(logprob)} nats`
          + (chosen.note ? ` · ${chosen.note}` : "")), el("p", { class: "mono" }, formula(tree.lane, chosen, chosen.end)));
    }

    const select = (node, focus) => { chosen = node; redraw(focus ? node : null); };
    canvas.addEventListener("click", (event) => {
      const shape = event.target.closest("[data-node], [data-unfold], [data-chain]");
      if (!shape) return;
      if (shape.dataset.unfold !== undefined) { unfolded.add(Number(shape.dataset.unfold)); redraw(); }
      else if (shape.dataset.chain !== undefined) { chains.add(Number(shape.dataset.chain)); redraw(); }
      else select(tree.nodes[Number(shape.dataset.node)], true);
    });
    canvas.addEventListener("keydown", (event) => {
      const shape = event.target.closest("[data-node], [data-unfold], [data-chain]");
      if (!shape) return;
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); shape.dispatchEvent(new MouseEvent("click", { bubbles: true })); return; }
      if (shape.dataset.node === undefined) return;
      const node = tree.nodes[Number(shape.dataset.node)];
      const drawn = [...canvas.querySelectorAll("[data-node]")].map((one) => tree.nodes[Number(one.dataset.node)]);
      const row = drawn.filter((one) => one.depth === node.depth).sort((one, other) => yOf(one) - yOf(other));
      const next = { ArrowLeft: drawn.find((one) => one === node.parent), ArrowRight: drawn.filter((one) => one.parent === node).sort(order)[0],
        ArrowUp: row[row.indexOf(node) - 1], ArrowDown: row[row.indexOf(node) + 1] }[event.key];
      if (event.key.startsWith("Arrow")) event.preventDefault();
      if (next) select(next, true);
    });
    let wide = window.innerWidth;
    window.addEventListener("resize", () => { if (tree && window.innerWidth !== wide) { wide = window.innerWidth; redraw(); } });
    const yOf = (node) => Number(canvas.querySelector(`[data-node="${node.number}"] rect`).getAttribute("y"));

    return (place) => {
      tree = treeOf(place);
      made.hidden = !tree;
      if (!tree) return;
      const most = tree.nodes.reduce((high, node) => Math.max(high, node.depth), 1);
      slider.max = most;
      slider.value = most;
      unfolded = new Set();
      chains = new Set();
      chosen = tree.ends.length ? tree.ends[0].at : null;
      if (chosen && chosen.id === null) chosen = chosen.parent;
      redraw();
    };
  }

  function rowsSection() {
    if (data.lanes.length < 2 || data.comparison) return;
    const rows = data.lanes.flatMap((lane, place) => {
      const one = (lane.sequences || [])[0];
      return [{ place, order: lane.place || place, name: nameOf(lane), prompt: lane.prompt || "", text: one ? one.text : lane.error ? lane.error.message : "", tokens: one ? one.tokens : null,
        mean: one && one.tokens && typeof one.logprob === "number" ? one.logprob / one.tokens : null, end: lane.error ? "failed" : one ? ending(one) : "" }];
    });
    const heads = [["name", "prompt"], ["prompt", "begins"], ["text", "text"], ["tokens", "tokens"], ["mean", "log-probability per token"], ["end", "ended"]];
    let sorted = ["order", 1], wanted = "", shown = 200;
    const body = el("tbody"), status = el("p", { class: "note", role: "status" });
    const more = el("button", { type: "button", onclick: () => { shown += 1000; refresh(); } }, "Show more");
    const columns = heads.map(([key, label]) => el("th", { scope: "col", "data-key": key, class: key === "tokens" || key === "mean" ? "number" : null },
      el("button", { type: "button", onclick: () => { sorted = [key, sorted[0] === key ? -sorted[1] : 1]; refresh(); } }, label, el("span", { class: "arrow", "aria-hidden": "true" }, " ↕"))));
    function refresh() {
      const [key, way] = sorted;
      const found = rows.filter((row) => `${row.name} ${row.prompt} ${row.text} ${row.end}`.toLowerCase().includes(wanted));
      const value = (row) => (row[key] === null ? -Infinity : row[key]);
      found.sort((one, other) => way * (typeof value(one) === "string" ? one[key].localeCompare(other[key], "en", { numeric: true }) : value(one) - value(other)) || one.order - other.order);
      body.replaceChildren(...found.slice(0, shown).map((row) => el("tr", {},
        el("th", { scope: "row" }, el("button", { type: "button", onclick: () => showLane(row.place) }, row.name)), el("td", {}, brief(row.prompt, 60)),
        el("td", { class: row.end === "failed" ? "failed" : null }, brief(row.text, 90)), el("td", { class: "number" }, row.tokens === null ? "–" : String(row.tokens)),
        el("td", { class: "number" }, number(row.mean)), el("td", {}, row.end))));
      for (const column of columns) {
        const ours = column.dataset.key === key;
        column.setAttribute("aria-sort", ours ? (way > 0 ? "ascending" : "descending") : "none");
        column.querySelector(".arrow").textContent = ours ? (way > 0 ? " ▲" : " ▼") : " ↕";
      }
      status.textContent = `${counted(found.length, "prompt")}${found.length > shown ? `, the first ${shown} shown` : ""}`;
      more.hidden = found.length <= shown;
    }
    const search = el("input", { type: "search", oninput: () => { wanted = search.value.toLowerCase(); refresh(); } });
    section("rows", "Prompts", el("div", { class: "charts" },
      histogram("Tokens of each text", rows.map((row) => row.tokens), 0), histogram("Log-probability per token, in nats", rows.map((row) => row.mean), 2)),
    el("div", { class: "controls" }, el("label", {}, "Filter ", search)), status,
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, columns)), body)), more);
    refresh();
  }

  function histogram(title, values, digits) {
    const known = values.filter((value) => value !== null && Number.isFinite(value));
    if (known.length < 2) return null;
    const low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b));
    if (low === high) return el("figure", {}, el("figcaption", {}, title, el("span", { class: "note" }, ` all ${number(low, digits)}`)));
    const bins = Math.min(24, Math.max(1, digits ? 24 : high - low + 1)), width = (high - low) / bins || 1;
    const many = new Array(bins).fill(0);
    for (const value of known) many[Math.min(bins - 1, Math.floor((value - low) / width))] += 1;
    const wide = Math.min(420, column(false) - 10), most = Math.max(...many), size = wide / bins;
    const sorted = [...known].sort((a, b) => a - b), half = sorted.length / 2;
    const middle = (sorted[Math.ceil(half) - 1] + sorted[Math.floor(half)]) / 2;
    const median = number(middle, Number.isInteger(middle) ? digits : Math.max(digits, 1));
    return el("figure", {}, el("figcaption", {}, title, el("span", { class: "note" }, ` ${number(low, digits)} to ${number(high, digits)}, median ${median}`)),
      draw("svg", { width: wide + 10, height: 130, role: "img", "aria-label": `${title}: ${number(low, digits)} to ${number(high, digits)}, median ${median}` },
        many.map((count, at) => draw("rect", { class: "bar", x: at * size + 1, width: Math.max(size - 2, 1), y: 105 - (100 * count) / most, height: (100 * count) / most },
          draw("title", {}, `${number(low + at * width, digits)} to ${number(low + (at + 1) * width, digits)}: ${count}`))),
        draw("line", { class: "axis", x1: 0, x2: wide + 5, y1: 105.5, y2: 105.5 }),
        draw("text", { class: "soft", x: 0, y: 122 }, number(low, digits)), draw("text", { class: "soft", x: wide + 4, y: 122, "text-anchor": "end" }, number(high, digits))));
  }

  function comparisonSection() {
    const shown = data.comparison;
    if (!shown) return;
    const body = el("div"), controls = el("div", { class: "controls" });
    let linked = true;
    const show = (place) => {
      const prompt = shown.prompts[place];
      const columns = shown.runs.map((run) => column(run, prompt));
      body.replaceChildren(el("p", { class: "prompt" }, visible(laneOf(Object.values(prompt.lanes)[0][0]).prompt || "")),
        el("div", { class: "columns" }, columns.map((one) => one.element)));
      for (const one of columns) if (one.row) one.row.element.addEventListener("scroll", () => linked && follow(columns, one));
    };
    controls.append(...(shown.prompts.length > 1 ? [choice("Prompt", shown.prompts.map((prompt) => `${prompt.id}: ${brief(laneOf(Object.values(prompt.lanes)[0][0]).prompt || "", 40)}`), show)] : []),
      checkbox("scroll together", (on) => { linked = on; }, true));
    section("comparison", "Comparison", controls, body, metrics(shown));
    show(0);

    function column(run, prompt) {
      const lanes = prompt.lanes[run] || [], parting = prompt.partings[run];
      const lane = lanes.length ? laneOf(lanes[0]) : null, tree = lane && lane.prompt !== undefined ? treeOf(data.lanes.indexOf(lane)) : null;
      const end = tree && tree.ends[0], path = end ? pathTo(end.at) : [];
      const row = end ? strip(path, `Tokens of ${run}`, { parting: parting && !parting.equal ? parting.position : -1, open: (token, at) => {
        facts.textContent = `${sentence(token, at)}${token.entropy === null ? "" : `, entropy ${number(token.entropy)}`}`;
      } }) : null;
      const facts = el("p", { class: "note", role: "status" }, lane && lane.error ? `${lane.error.code}: ${lane.error.message}` : end ? `${counted(end.tokens, "token")} · ${ending(end)}` : "");
      const words = (pair) => (pair ? `${quoted(pair[0], pair[1])} ${pair[2] === null ? "" : percent(pair[2])}` : "the end");
      const note = run === shown.base ? "the others are compared with this run"
        : !parting ? "" : parting.equal ? `equal to ${shown.base}`
          : `after ${counted(parting.position, "token")}: ${words(parting.token)} instead of ${words(parting.other)}`;
      const others = lanes.length > 1 ? `, first of ${lanes.length} seeds` : "";
      return { run, row, parting, element: el("div", {}, el("h4", {}, `${run}${others}`), el("p", { class: "note" }, note),
        row ? row.element : el("div", { class: "strip" }, lane ? visible(((lane.sequences || [])[0] || { text: "" }).text) : ""), facts) };
    }

    // Columns move so that the first differences stand beside each other.
    function follow(columns, moved) {
      const home = columns.find((one) => one.run === shown.base);
      if (!home || !home.row || body.dataset.moving) return;
      body.dataset.moving = "1";
      const top = (one, at) => { const token = one.row.places[Math.min(at, one.row.places.length - 1)]; return token ? token.offsetTop : 0; };
      const shift = (one) => (one.parting && !one.parting.equal ? top(one, one.parting.position) - top(home, one.parting.position) : 0);
      const at = moved.row.element.scrollTop - (moved === home ? 0 : shift(moved));
      for (const one of columns) if (one !== moved && one.row) one.row.element.scrollTop = at + (one === home ? 0 : shift(one));
      requestAnimationFrame(() => { delete body.dataset.moving; });
    }
  }

  function measured([mean, low, high], digits) {
    return low === null ? number(mean, digits) : `${number(mean, digits)} (${number(low, digits)} to ${number(high, digits)})`;
  }

  function metrics(shown) {
    const wide = Math.min(420, column(false)), left = Math.min(130, wide / 3), high = 22;
    const several = shown.metrics.some((metric) => Object.values(metric.runs).some((one) => one[3] > 1));
    const figures = (several ? shown.metrics : []).map((metric) => {
      const entries = shown.runs.filter((run) => metric.runs[run]).map((run) => [run, ...metric.runs[run]]);
      const low = Math.min(...entries.map(([, mean, one]) => one ?? mean)), top = Math.max(...entries.map(([, mean, , one]) => one ?? mean));
      const x = (value) => left + 10 + ((value - low) / (top - low || 1)) * (wide - left - 30);
      return el("figure", {}, el("figcaption", {}, metric.label), draw("svg", { width: wide, height: entries.length * high + 22, role: "img",
        "aria-label": `${metric.label}: ${entries.map(([run, mean]) => `${run} ${number(mean, metric.digits)}`).join(", ")}` },
      entries.map(([run, mean, from, to], at) => [
        draw("text", { x: left, y: at * high + 15, "text-anchor": "end" }, brief(run, 16)),
        from !== null && draw("line", { class: "one", x1: x(from), x2: x(to), y1: at * high + 11, y2: at * high + 11 }),
        draw("circle", { class: "dot", cx: x(mean), cy: at * high + 11, r: 4 }, draw("title", {}, `${run}: ${measured([mean, from, to], metric.digits)}`))]),
      draw("text", { class: "soft", x: left + 10, y: entries.length * high + 16 }, number(low, metric.digits)),
      draw("text", { class: "soft", x: wide - 10, y: entries.length * high + 16, "text-anchor": "end" }, number(top, metric.digits))));
    });
    const rows = shown.metrics.map((metric) => [metric.label, ...shown.runs.map((run) => {
      const one = metric.runs[run];
      return one ? measured(one, metric.digits) : "–";
    })]);
    return el("div", {}, el("h3", {}, "Metrics"), el("div", { class: "wide" }, table("Means over the prompts; 95% intervals from 10 prompts on", ["metric", ...shown.runs], rows)),
      el("div", { class: "charts" }, figures));
  }

  function cacheSection() {
    const cache = data.cache;
    if (!cache) return;
    const size = (bytes) => { const units = ["bytes", "KiB", "MiB", "GiB", "TiB"]; let at = 0; while (bytes >= 1024 && at < 4) { bytes /= 1024; at += 1; } return at ? `${bytes.toFixed(1)} ${units[at]}` : counted(bytes, "byte"); };
    const body = el("div"), said = el("output");
    const passes = cache.steps || [];
    const slider = el("input", { type: "range", min: 0, max: Math.max(passes.length - 1, 0), value: Math.max(passes.length - 1, 0), "aria-label": "Pass", oninput: () => show() });
    const facts = [["total", cache.total_bytes], ["reserved", cache.reserved_bytes], ["weights", cache.weights_bytes], ["per new token and row", cache.bytes_per_token]];
    section("cache", "Cache", el("dl", { class: "facts" }, facts.filter(([, bytes]) => bytes !== null && bytes !== undefined).map(([label, bytes]) => el("div", {}, el("dt", {}, label), el("dd", {}, size(bytes))))),
      passes.length > 1 && el("div", { class: "controls" }, el("label", {}, "Pass ", slider, " ", said)), body);
    const most = Math.max(1, ...passes.flatMap((one) => one.layers.map((layer) => layer.bytes)));
    function show() {
      const pass = passes[Number(slider.value)] || { layers: cache.layers || [], step: 0 };
      said.textContent = pass.step === 0 ? "the prompt" : `step ${pass.step}`;
      const rows = pass.layers.map((layer) => {
        const bar = draw("svg", { width: 260, height: 18, role: "img", "aria-label": size(layer.bytes) },
          draw("rect", { class: "bar", x: 1, y: 3, height: 12, width: (255 * layer.bytes) / most }));
        return [String(layer.layer), layer.kind, (layer.shape || []).join(" × "), bar, size(layer.bytes)];
      });
      body.replaceChildren(el("div", { class: "wide" }, table(`Layers after ${pass.step === 0 ? "the prompt" : `step ${pass.step}`}`,
        ["layer", "kind", "shape", "bytes of keys and values", "measured"], rows, { numbers: [4] })));
    }
    show();
  }

  rowsSection();
  comparisonSection();
  tokensSection();
  cacheSection();
})();
