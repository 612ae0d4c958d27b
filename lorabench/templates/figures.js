"use strict";
// Unpacks plotly.js, draws every figure, and draws again when the page turns dark, light or paper.
(async () => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const family = getComputedStyle(document.documentElement).fontFamily;
  const PAPER_WIDTH = 660; // pixels between the margins of A4
  const [INK, EDGE, RULE, CLEAR] = ["#1b1f24", "#8b949e", "#e3e6ea", "rgba(0, 0, 0, 0)"];

  const packed = Uint8Array.from(
    atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const plotly = document.createElement("script");
  plotly.textContent = await new Response(stream).text();
  document.head.append(plotly);

  // Colours for a dark page are made from those for a light one, in OKLab, where L is how light
  // a colour looks: greys are turned over, so that ink stays ink and paper paper; hues keep their
  // angle and are lifted until they stand out. Scales are turned over whole, to keep their order.
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const gamma = (c) => (c <= 0.0031308 ? 12.92 * c : 1.055 * c ** (1 / 2.4) - 0.055);
  function darkened(colour, scale) {
    if (!CSS.supports("color", colour)) return colour;
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = colour;
    const css = pen.fillStyle; // "#rrggbb" or "rgba(r, g, b, a)"
    const parts = css.startsWith("#")
      ? [1, 3, 5].map((i) => parseInt(css.slice(i, i + 2), 16))
      : css.match(/[\d.]+/g).map(Number);
    const [r, g, b] = parts.slice(0, 3).map((c) => linear(c / 255));
    const [l, m, s] = [
      0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b,
      0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b,
      0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b,
    ].map(Math.cbrt);
    const L = 0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s;
    const A = 1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s;
    const B = 0.0259040371 * l + 0.7827717662 * m - 0.8086757660 * s;
    const grey = Math.hypot(A, B) < 0.04;
    const light = scale ? 0.95 - 0.75 * L : grey ? 0.95 - 0.75 * L ** 2.5 : 0.4 + 0.48 * L;
    const [x, y, z] = [
      light + 0.3963377774 * A + 0.2158037573 * B,
      light - 0.1055613458 * A - 0.0638541728 * B,
      light - 0.0894841775 * A - 1.2914855480 * B,
    ].map((c) => c ** 3);
    const rgb = [
      4.0767416621 * x - 3.3077115913 * y + 0.2309699292 * z,
      -1.2684380046 * x + 2.6097574011 * y - 0.3413193965 * z,
      -0.0041960863 * x - 0.7034186147 * y + 1.7076147010 * z,
    ].map((c) => Math.round(255 * Math.min(1, Math.max(0, gamma(Math.max(0, c))))));
    return `rgba(${rgb.join(", ")}, ${parts[3] ?? 1})`;
  }
  function recoloured(value, key = "", coloured = false, scale = false) {
    coloured ||= /(color|colorway)$/.test(key);
    scale ||= /colorscale$/.test(key);
    if (typeof value === "string") return coloured || scale ? darkened(value, scale) : value;
    if (Array.isArray(value)) return value.map((v) => recoloured(v, "", coloured, scale));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(
      Object.entries(value).map(([k, v]) => [k, recoloured(v, k, false, scale)]));
  }

  function draw(figure, isDark, width) {
    const { data, layout: given, frames } = JSON.parse(figure.querySelector("script").textContent);
    const template = given.template?.layout ?? {};
    const axis = { gridcolor: RULE, zerolinecolor: EDGE, linecolor: EDGE, automargin: true };
    const light = {
      ...given,
      template: { ...given.template, layout: {
        ...template, xaxis: { ...axis, ...template.xaxis }, yaxis: { ...axis, ...template.yaxis },
      } },
      font: { ...given.font, color: INK, family },
      paper_bgcolor: CLEAR,
      plot_bgcolor: CLEAR,
      modebar: { bgcolor: CLEAR, color: EDGE, activecolor: INK },
    };
    const layout = isDark ? recoloured(light) : light;
    layout.autosize = !width;
    layout.width = width;
    layout.uirevision = "kept"; // zoom and hidden traces outlive a change of colours
    const plot = figure.querySelector(".plot");
    plot.querySelector(":scope > p")?.remove();
    return Plotly.react(plot, { data: isDark ? recoloured(data) : data, layout, frames,
      config: {
        responsive: true, displaylogo: false, showSendToCloud: false,
        modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
      } });
  }

  const figures = [...document.querySelectorAll("figure[role=img]")];
  const drawAll = (isDark, width) => Promise.all(figures.map((f) => draw(f, isDark, width)));
  dark.addEventListener("change", () => drawAll(dark.matches));
  addEventListener("beforeprint", () => drawAll(false, PAPER_WIDTH));
  addEventListener("afterprint", () => drawAll(dark.matches));
  await drawAll(dark.matches);
  document.documentElement.dataset.figures = "drawn";
})();
