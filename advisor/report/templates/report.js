(function () {
  "use strict";
  var figures = Array.from(document.querySelectorAll("script[data-figure]")).map(function (source) {
    return { place: document.getElementById("figure-" + source.dataset.figure), figure: JSON.parse(source.textContent) };
  });
  function colours() {
    var style = getComputedStyle(document.documentElement);
    var text = style.getPropertyValue("--text").trim(), grid = style.getPropertyValue("--grid").trim();
    return { "font.color": text, "xaxis.gridcolor": grid, "yaxis.gridcolor": grid, "xaxis.linecolor": grid, "yaxis.linecolor": grid };
  }
  // on a narrow page the plans' names would leave no room for their bars; the tables have them
  function shorten(item) {
    var bars = item.figure.data.find(function (trace) { return trace.type === "bar" && /^\d+\. /.test(trace.y[0]); });
    if (!bars || item.place.clientWidth >= 600) { return; }
    item.figure.layout.yaxis.tickvals = bars.y;
    item.figure.layout.yaxis.ticktext = bars.y.map(function (name) { return /^\d+\. /.test(name) ? "plan " + parseInt(name, 10) : "one GPU"; });
  }
  function draw() {
    figures.forEach(function (item) {
      shorten(item);
      Plotly.newPlot(item.place, item.figure.data, item.figure.layout, { responsive: true, displayModeBar: false })
        .then(function () { return Plotly.relayout(item.place, colours()); });
    });
  }
  function recolour() { figures.forEach(function (item) { Plotly.relayout(item.place, colours()); }); }
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  matchMedia("print").addEventListener("change", recolour);
})();
