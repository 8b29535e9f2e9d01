"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const root = document.documentElement;
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  let drawn = [];

  const config = (isDark) => {
    const text = isDark ? "#e6e9ee" : "#1b1f24";
    const soft = isDark ? "#9aa4b2" : "#5b6470";
    const line = isDark ? "#323a45" : "#dfe3e8";
    const font = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
    return {
      background: "transparent",
      font,
      title: { color: text, fontSize: 13, anchor: "start", fontWeight: 600 },
      axis: {
        labelColor: soft, titleColor: soft, gridColor: line, domainColor: line, tickColor: line,
        titleFontWeight: "normal", labelFlush: false, labelSeparation: 4,
      },
      legend: { labelColor: text, titleColor: soft, symbolType: "square" },
      view: { stroke: "transparent" },
      range: {
        category: ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a300",
          "#8a63d2", "#7f7f7f", "#17becf"],
      },
    };
  };

  const draw = async (theme) => {
    root.dataset.theme = theme;
    drawn.forEach((view) => view.finalize());
    drawn = [];
    for (const place of document.querySelectorAll(".chart")) {
      const spec = charts[Number(place.dataset.chart)];
      const options = {
        actions: false, renderer: "svg", config: config(theme === "dark"),
        tooltip: { theme },
      };
      drawn.push(await window.vegaEmbed(place, spec, options));
    }
    root.dataset.drawn = String(drawn.length);
  };

  const asked = new URLSearchParams(window.location.search).get("theme");
  let theme = asked || (prefersDark.matches ? "dark" : "light");
  const redraw = () => draw(theme).catch((error) => {
    root.dataset.failed = String(error);
    console.error(error);
  });
  // A page from a folder may lack the clipboard: the text is selected, for the keyboard to copy.
  for (const button of document.querySelectorAll(".copy")) {
    const code = button.parentElement.querySelector("code");
    button.addEventListener("click", async () => {
      window.getSelection().selectAllChildren(code);
      const copied = navigator.clipboard?.writeText(code.textContent) ?? Promise.reject();
      button.textContent = await copied.then(() => "Copied", () => "Selected");
    });
  }
  document.getElementById("theme").addEventListener("click", () => {
    theme = theme === "dark" ? "light" : "dark";
    redraw();
  });
  prefersDark.addEventListener("change", (event) => {
    theme = event.matches ? "dark" : "light";
    redraw();
  });
  redraw();
})();
