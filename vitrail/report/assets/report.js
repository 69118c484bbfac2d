/* Charts, sortable tables and buttons of a report. Names come from the data, so they are only ever inserted as text. */
"use strict";

(() => {
  const root = document.documentElement;
  const specs = JSON.parse(document.getElementById("specs").textContent);
  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)}%`;
  const plain = (value) => (value === null ? "–" : Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 }));
  const whole = (value) => value.toLocaleString("en");
  const tone = (name) => colour(typeof name === "number" ? `tone-${name % 7}` : name);

  /* Tooltips are built of nodes, so class names are never parsed as HTML. */
  function node(tag, kind, text) {
    const made = document.createElement(tag);
    if (kind) made.className = kind;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function tip(title, rows) {
    const made = node("div", "tip");
    made.append(node("b", "", title));
    for (const [name, value, shade] of rows) {
      const row = node("div", "row");
      const left = node("span", "", name);
      if (shade) {
        const dot = node("span", "dot");
        dot.style.background = shade;
        left.prepend(dot, " ");
        dot.style.display = "inline-block";
      }
      row.append(left, node("b", "", value));
      made.append(row);
    }
    return made;
  }

  function base() {
    return {
      animation: false,
      textStyle: { fontFamily: colour("sans"), fontSize: 12, color: colour("soft") },
      tooltip: {
        confine: true,
        backgroundColor: colour("raised"),
        borderColor: colour("line"),
        textStyle: { color: colour("ink"), fontSize: 13 },
        extraCssText: "box-shadow: 0 4px 16px rgb(0 0 0 / .14); border-radius: 4px;",
      },
    };
  }

  function axis(more = {}) {
    return {
      axisLine: { show: false },
      axisTick: { show: false },
      nameTextStyle: { color: colour("soft") },
      axisLabel: { color: colour("soft"), hideOverlap: true },
      splitLine: { lineStyle: { color: colour("line") } },
      ...more,
    };
  }

  const below = (name) => ({ name, nameLocation: "middle", nameGap: 26 });
  const beside = (name, gap = 46) => ({ name, nameLocation: "middle", nameGap: gap });

  /* One builder per kind of chart: from its data and the available width to an ECharts option. */
  const kinds = {
    lines(spec) {
      const format = spec.percent ? (v) => `${Number((100 * v).toFixed(2))}%` : (v) => plain(v);
      const values = spec.percent ? (v) => percent(v, 2) : plain;
      const names = new Set(spec.lines.map((line) => line.name));
      const epochs = spec.x === "epoch";
      const ends = spec.square ? { min: 0, max: 1, interval: 0.25 } : spec.log ? { min: "dataMin", max: "dataMax" } : epochs ? { min: "dataMin", max: "dataMax", minInterval: 1 } : { min: 0 };
      return {
        ...base(),
        grid: { left: spec.y ? 34 : 6, right: spec.square ? 24 : 14, top: 34, bottom: 24, containLabel: true },
        legend: { show: names.size > 1, left: 0, top: 0, itemWidth: 14, itemHeight: 3, icon: "rect", type: "scroll", textStyle: { color: colour("soft") } },
        tooltip: {
          ...base().tooltip,
          trigger: spec.square ? "item" : "axis",
          formatter(params) {
            const all = Array.isArray(params) ? params : [params];
            return tip(
              `${spec.x} ${plain(all[0].value[0])}`,
              all.map((p) => [p.seriesName, p.value[1] === null ? "–" : values(p.value[1]), p.color]),
            );
          },
        },
        xAxis: axis({ type: spec.log ? "log" : "value", ...ends, splitLine: { show: false }, ...below(spec.x), axisLabel: { color: colour("soft"), hideOverlap: true, formatter: spec.square ? format : spec.log ? plain : undefined } }),
        yAxis: axis({ type: "value", scale: spec.low === null, min: spec.square ? 0 : spec.low ?? undefined, max: spec.square ? 1 : spec.high ?? undefined, interval: spec.square ? 0.25 : undefined, splitNumber: 4, ...beside(spec.y), axisLabel: { color: colour("soft"), formatter: format } }),
        series: spec.lines.map((line, i) => ({
          name: line.name,
          type: "line",
          data: line.x.map((x, k) => [x, line.y[k]]),
          color: tone(line.tone),
          z: line.tone === "pale" ? 2 : 3,
          step: line.steps ? "end" : false,
          showSymbol: line.x.length < 3 && !line.dashed,
          symbol: "circle",
          symbolSize: 6,
          lineStyle: { width: line.tone === "pale" ? 1 : line.dashed ? 1.5 : 2, type: line.dashed ? "dashed" : "solid" },
          emphasis: { disabled: true },
          markPoint: line.dot
            ? { symbol: "circle", symbolSize: line.tone === "pale" ? 8 : 11, silent: true, label: { show: false }, itemStyle: { color: tone(line.tone), borderColor: colour("paper"), borderWidth: 2 }, data: [{ coord: line.dot }] }
            : undefined,
          markLine:
            spec.mark !== null && i === 0
              ? { symbol: "none", silent: true, precision: 12, label: { show: false }, lineStyle: { color: colour("warm"), type: "dashed", width: 1 }, data: [{ xAxis: spec.mark }] }
              : undefined,
        })),
      };
    },

    matrix(spec, width) {
      const count = spec.names.length;
      const longest = Math.max(...spec.names.map((name) => name.length));
      const room = Math.min(Math.max(longest * 7 + 16, 34), width < 500 ? 84 : 130);
      const cell = Math.max((width - room - 8) / count, 9);
      const counted = cell >= 26;
      const right = [], wrong = [];
      for (let y = 0; y < count; y++) {
        for (let x = 0; x < count; x++) {
          const n = spec.counts[y][x];
          const share = spec.totals[y] ? n / spec.totals[y] : 0;
          /* The square root makes rare mistakes visible. */
          const shade = Math.sqrt(share);
          (x === y ? right : wrong).push({ value: [x, y, shade, n, share], label: { color: shade > 0.55 ? colour("paper") : colour("ink") } });
        }
      }
      const label = { show: counted, fontSize: Math.min(12, cell * 0.32), formatter: (p) => (p.value[3] ? whole(p.value[3]) : "") };
      const names = (rotate) => ({ color: colour("ink"), interval: cell < 11 ? "auto" : 0, fontSize: Math.min(12, Math.max(8, cell * 0.8)), rotate, width: room - 14, overflow: "truncate", formatter: (name) => name });
      const heat = (name, data) => ({ name, type: "heatmap", data, label, itemStyle: { borderColor: colour("paper"), borderWidth: cell > 14 ? 1.5 : 0.5 }, emphasis: { itemStyle: { borderColor: colour("ink"), borderWidth: 1.5 } } });
      const ramp = (hue) => [colour("faint"), ...[2, 3, 4].map((step) => colour(`${hue}-${step}`))];
      const steep = longest * 6.5 > cell;
      const foot = !steep ? 26 : cell < 16 ? room : room * 0.75 + 8;
      return {
        height: cell * count + foot + 4,
        least: room + 9 * count + 8,
        ...base(),
        grid: { left: room, right: 8, top: 4, bottom: foot, outerBoundsMode: "none" },
        tooltip: {
          ...base().tooltip,
          formatter({ value: [x, y, , n, share] }) {
            const rows = [["images", `${whole(n)} of ${whole(spec.totals[y])}`], ["share of the true class", percent(share)]];
            return tip(x === y ? `${spec.names[y]}, correct` : `${spec.names[y]}, predicted as ${spec.names[x]}`, rows);
          },
        },
        xAxis: axis({ type: "category", data: spec.names, splitLine: { show: false }, axisLabel: names(steep ? (cell < 16 ? 90 : 45) : 0) }),
        yAxis: axis({ type: "category", data: spec.names, inverse: true, splitLine: { show: false }, axisLabel: names(0) }),
        visualMap: [
          { show: false, seriesIndex: 0, dimension: 2, min: 0, max: 1, inRange: { color: ramp("cool") } },
          { show: false, seriesIndex: 1, dimension: 2, min: 0, max: 1, inRange: { color: ramp("warm") } },
        ],
        series: [heat("right", right), heat("wrong", wrong)],
      };
    },

    reliability(spec) {
      const total = spec.bins.reduce((sum, [, , n]) => sum + n, 0);
      const edges = (i) => `${percent(i / spec.bins.length, 0)} to ${percent((i + 1) / spec.bins.length, 0)}`;
      const share = { type: "value", min: 0, max: 1, interval: 0.25 };
      const labels = { color: colour("soft"), formatter: (v) => percent(v, 0) };
      return {
        height: 380,
        ...base(),
        grid: [{ left: 66, right: 18, top: 12, height: 236, outerBoundsMode: "none" }, { left: 66, right: 18, top: 264, height: 64, outerBoundsMode: "none" }],
        tooltip: {
          ...base().tooltip,
          trigger: "item",
          formatter({ dataIndex }) {
            const [sure, right, n] = spec.bins[dataIndex];
            return tip(`${spec.x} ${edges(dataIndex)}`, [[spec.things, `${whole(n)} (${percent(n / total)})`], ["mean", percent(sure)], [spec.y, n ? percent(right) : "–"]]);
          },
        },
        xAxis: [
          axis({ type: "category", data: spec.bins.map((_, i) => i), show: false, gridIndex: 0 }),
          axis({ ...share, gridIndex: 0, position: "bottom", splitLine: { show: false }, axisLabel: { show: false } }),
          axis({ type: "category", data: spec.bins.map((_, i) => i), show: false, gridIndex: 1 }),
          axis({ ...share, gridIndex: 1, position: "bottom", splitLine: { show: false }, axisLabel: labels, ...below(spec.x) }),
        ],
        yAxis: [
          axis({ ...share, gridIndex: 0, axisLabel: labels, ...beside(spec.y) }),
          axis({ type: "value", gridIndex: 1, min: 0, splitNumber: 1, axisLabel: { color: colour("soft"), hideOverlap: true, formatter: (v) => percent(v, 0) } }),
        ],
        series: [
          { type: "bar", data: spec.bins.map(([, right, n]) => (n ? right : null)), barCategoryGap: "8%", color: colour("cool-3"), itemStyle: { borderRadius: [2, 2, 0, 0] } },
          { type: "line", xAxisIndex: 1, yAxisIndex: 0, data: [[0, 0], [1, 1]], silent: true, showSymbol: false, color: colour("ink"), lineStyle: { width: 1, type: "dashed" } },
          { type: "bar", xAxisIndex: 2, yAxisIndex: 1, data: spec.bins.map(([, , n]) => n / total), barCategoryGap: "8%", color: colour("plain"), itemStyle: { borderRadius: [2, 2, 0, 0] } },
          { type: "line", xAxisIndex: 3, yAxisIndex: 1, data: [], silent: true },
        ],
      };
    },

    bars(spec, width) {
      return {
        height: 22 * spec.names.length + 50,
        ...base(),
        grid: { left: 6, right: 20, top: 4, bottom: 24, containLabel: true },
        tooltip: { ...base().tooltip, trigger: "axis", axisPointer: { type: "none" }, formatter: ([p]) => tip(spec.names[p.dataIndex], [[spec.x, percent(spec.values[p.dataIndex])], [spec.tick, percent(spec.ticks[p.dataIndex])]]) },
        xAxis: axis({ type: "value", min: 0, max: 1, axisLabel: { color: colour("soft"), formatter: (v) => percent(v, 0) } }),
        yAxis: axis({ type: "category", inverse: true, data: spec.names, splitLine: { show: false }, axisLabel: { color: colour("ink"), interval: 0, width: width / 3, overflow: "truncate" } }),
        series: [
          { type: "bar", data: spec.values, color: colour("cool-3"), barWidth: "62%", itemStyle: { borderRadius: [0, 2, 2, 0] } },
          { type: "scatter", data: spec.ticks.map((tick, i) => [tick, i]), symbol: "rect", symbolSize: [2, 14], color: colour("ink"), silent: true },
        ],
      };
    },

    scatter(spec) {
      const points = spec.true.map((value, i) => [value, spec.predicted[i]]);
      const all = points.flat();
      const ends = [Math.min(...all), Math.max(...all)];
      return {
        height: 340,
        ...base(),
        grid: { left: 58, right: 16, top: 10, bottom: 44, outerBoundsMode: "none" },
        tooltip: { ...base().tooltip, formatter: ({ value: [x, y] }) => tip(spec.title, [["true", plain(x)], ["predicted", plain(y)], ["error", plain(y - x)]]) },
        xAxis: axis({ type: "value", scale: true, splitLine: { show: false }, ...below("true") }),
        yAxis: axis({ type: "value", scale: true, ...beside("predicted", 40) }),
        series: [
          { type: "line", data: ends.map((end) => [end, end]), silent: true, showSymbol: false, color: colour("ink"), lineStyle: { width: 1, type: "dashed" } },
          { type: "scatter", data: points, symbolSize: points.length > 500 ? 4 : 6, color: colour("cool-3"), itemStyle: { opacity: 0.55 } },
        ],
      };
    },

    heads(spec) {
      const points = spec.layers.flatMap((heads, layer) => heads.map((far, head) => [layer + 1, far, head + 1]));
      const middle = (heads) => heads.reduce((sum, far) => sum + far, 0) / heads.length;
      const depth = spec.layers.length;
      const line = (name, shade, values) => ({ name, type: "line", data: values.map((far, layer) => [layer + 1, far]), silent: true, showSymbol: false, color: colour(shade), lineStyle: { width: 1.5, type: "dashed" } });
      return {
        height: 300,
        ...base(),
        grid: { left: 52, right: 16, top: 34, bottom: 44, outerBoundsMode: "none" },
        legend: { left: 0, top: 0, itemWidth: 14, itemHeight: 3, icon: "rect", textStyle: { color: colour("soft") }, data: ["layer mean", spec.uniform] },
        tooltip: { ...base().tooltip, formatter: ({ value: [layer, far, head] }) => tip(`layer ${layer}, head ${head}`, [["distance", `${far.toFixed(1)} px`]]) },
        xAxis: axis({ type: "value", min: 0, max: depth + 1, interval: 1, splitLine: { show: false }, ...below("layer"), axisLabel: { color: colour("soft"), hideOverlap: true, formatter: (v) => (v < 1 || v > depth ? "" : v) } }),
        yAxis: axis({ type: "value", min: 0, ...beside("pixels", 34) }),
        series: [
          line(spec.uniform, "plain", spec.even),
          line("layer mean", "warm", spec.layers.map(middle)),
          { type: "scatter", data: points, symbolSize: 9, color: colour("cool-3"), itemStyle: { opacity: 0.8, borderColor: colour("paper"), borderWidth: 1 } },
        ],
      };
    },

    series(spec) {
      const values = spec.percent ? (v) => percent(v, 1) : plain;
      const whisker = (shade, aside) => (params, api) => {
        const [x, high] = api.coord([api.value(0), api.value(2)]);
        const [, low] = api.coord([api.value(0), api.value(1)]);
        return { type: "line", shape: { x1: x + aside, y1: low, x2: x + aside, y2: high }, style: { stroke: shade, lineWidth: 1 } };
      };
      const named = spec.names.length > 0;
      /* Points that are not joined are beside each other, in pixels, or they would hide each other. */
      const apart = named && !spec.series.some((s) => s.joined);
      const place = (i) => (apart ? 10 * (i - (spec.series.length - 1) / 2) : 0);
      const where = (x) => (named ? spec.names[x] : plain(x));
      return {
        height: 340,
        ...base(),
        grid: { left: 40, right: 20, top: 40, bottom: 34, containLabel: true },
        legend: { show: spec.series.length > 1, left: 0, top: 0, itemWidth: 14, itemHeight: 3, icon: "rect", type: "scroll", data: spec.series.map((s) => s.name), textStyle: { color: colour("soft") } },
        tooltip: { ...base().tooltip, trigger: "item", formatter: (p) => tip(`${spec.x} ${where(p.value[0])}`, [[p.seriesName, values(p.value[1]), p.color], ...(p.value.length > 2 && p.value[2] !== null ? [["lowest to highest", `${values(p.value[2])} – ${values(p.value[3])}`]] : [])]) },
        xAxis: named
          ? axis({ type: "category", data: spec.names, splitLine: { show: false }, ...below(spec.x), axisLabel: { color: colour("soft"), interval: 0, hideOverlap: true } })
          : axis({ type: spec.log ? "log" : "value", scale: true, splitLine: { show: false }, ...below(spec.x), axisLabel: { color: colour("soft"), hideOverlap: true, formatter: plain } }),
        yAxis: axis({ type: "value", scale: true, splitNumber: 4, ...beside(spec.y, 52), axisLabel: { color: colour("soft"), formatter: values } }),
        series: spec.series.flatMap((s, i) => [
          {
            name: s.name,
            type: "line",
            data: s.x.map((x, k) => [x, s.y[k], s.low[k], s.high[k]]),
            color: tone(s.tone),
            showSymbol: !s.dashed,
            symbol: "circle",
            symbolSize: 8,
            symbolOffset: [place(i), 0],
            lineStyle: { width: s.joined ? (s.dashed ? 1.5 : 2) : 0, type: s.dashed ? "dashed" : "solid" },
            emphasis: { disabled: true },
          },
          ...(s.dashed ? [] : [{ name: s.name, type: "custom", silent: true, tooltip: { show: false }, data: s.x.map((x, k) => [x, s.low[k], s.high[k]]).filter((v) => v[1] !== null), renderItem: whisker(tone(s.tone), place(i)) }]),
        ]),
      };
    },

    error_bars(spec) {
      const labels = { color: colour("soft"), formatter: (v) => percent(v, 0) };
      const names = spec.at.map(whole);
      const shade = colour("cool");
      const whisker = (params, api) => {
        const [x, high] = api.coord([api.value(0), api.value(1) + api.value(2)]);
        const [, low] = api.coord([api.value(0), api.value(1) - api.value(2)]);
        return { type: "line", shape: { x1: x, y1: low, x2: x, y2: high }, style: { stroke: shade, lineWidth: 1 } };
      };
      return {
        height: 300,
        ...base(),
        grid: { left: 66, right: 16, top: 12, bottom: 44, outerBoundsMode: "none" },
        tooltip: { ...base().tooltip, trigger: "item", formatter: ({ dataIndex: i }) => tip(`${names[i]} ${spec.x}`, [["mean", percent(spec.mean[i])], ["standard deviation", percent(spec.std[i])]]) },
        xAxis: axis({ type: "category", data: names, splitLine: { show: false }, ...below(spec.x) }),
        yAxis: axis({ type: "value", scale: true, axisLabel: labels, ...beside(spec.y) }),
        series: [
          { type: "scatter", data: spec.each.flatMap((values, i) => values.map((value) => [i, value])), silent: true, symbolSize: 6, color: colour("cool-2") },
          { type: "custom", data: spec.mean.map((mean, i) => [i, mean, spec.std[i]]), renderItem: whisker, silent: true },
          { type: "line", data: spec.mean, symbol: "circle", symbolSize: 8, color: shade, lineStyle: { width: 2 } },
        ],
      };
    },
  };

  /* Charts */
  const drawn = new Map();

  function draw(place) {
    const spec = specs[place.id];
    const room = place.parentElement.clientWidth;
    let { height, least, ...option } = kinds[spec.kind](spec, room);
    if (least > room) ({ height, least, ...option } = kinds[spec.kind](spec, least));
    place.style.width = least > room ? `${least}px` : "";
    if (height) place.style.height = `${height}px`;
    const chart = drawn.get(place) || echarts.init(place, null, { renderer: "svg" });
    drawn.set(place, chart);
    chart.resize();
    chart.setOption(option, { notMerge: true });
    if (spec.x === "epoch") chart.group = "epochs";
  }

  const places = [...document.querySelectorAll(".plot")];
  const redraw = () => places.forEach(draw);
  redraw();
  echarts.connect("epochs");
  let wide = window.innerWidth, waiting = 0;
  window.addEventListener("resize", () => {
    if (window.innerWidth === wide) return;
    wide = window.innerWidth;
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(redraw);
  });

  /* Light and dark mode: follows the system until the button is pressed; always light in print. */
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  function theme(name) {
    root.dataset.theme = name || chosen || (dark.matches ? "dark" : "light");
    redraw();
  }
  dark.addEventListener("change", () => theme());
  document.querySelector(".theme").addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    theme();
  });
  let closed = [];
  window.addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((each) => (each.open = true));
    root.classList.add("paper");
    theme("light");
  });
  window.addEventListener("afterprint", () => {
    closed.forEach((each) => (each.open = false));
    root.classList.remove("paper");
    theme();
  });

  /* Sortable tables */
  function key(row, column) {
    const value = row.cells[column].dataset.value;
    return value === "" || Number.isNaN(Number(value)) ? value : Number(value);
  }

  function compare(a, b) {
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), undefined, { numeric: true });
  }

  for (const button of document.querySelectorAll(".sorts thead button")) {
    button.addEventListener("click", () => {
      const head = button.closest("th");
      const numbers = head.classList.contains("number");
      const before = head.getAttribute("aria-sort");
      const order = before === "none" ? (numbers ? "descending" : "ascending") : before === "ascending" ? "descending" : "ascending";
      for (const other of head.parentElement.cells) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", order);
      const body = head.closest("table").tBodies[0];
      const sign = order === "ascending" ? 1 : -1;
      body.append(...[...body.rows].sort((a, b) => sign * compare(key(a, head.cellIndex), key(b, head.cellIndex))));
    });
  }

  /* Copy buttons */
  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      getSelection().selectAllChildren(code);
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "copied";
      } catch {
        button.textContent = "selected";
      }
      setTimeout(() => (button.textContent = "copy"), 1500);
    });
  }
})();
