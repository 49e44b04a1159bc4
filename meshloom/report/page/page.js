(() => {
  const [LEGEND_ROW, LEGEND_NAME] = [22, 230]; // pixels of a legend: a row's height, the width of a long name
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const charts = [...document.querySelectorAll(".chart")];
  const colours = () => {
    const style = getComputedStyle(document.documentElement);
    return { text: style.getPropertyValue("--text").trim(), line: style.getPropertyValue("--line").trim() };
  };
  const layoutOf = (given, rows) => {
    const { text, line } = colours();
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
    return {
      ...given,
      template: {},
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: text, family: "system-ui, sans-serif", size: 13 },
      height: given.height + rows * LEGEND_ROW,
      margin: { l: 50, r: 15, t: 30 + rows * LEGEND_ROW, b: 45 },
      legend: { orientation: "h", yref: "container", y: 1, yanchor: "top", x: 0 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: text, orientation: "v" },
      hovermode: "closest",
      transition: still.matches ? { duration: 0 } : undefined,
      xaxis: { ...given.xaxis, ...axis },
      yaxis: { ...given.yaxis, ...axis },
    };
  };
  const draw = (chart) => {
    const given = JSON.parse(document.getElementById(`${chart.id}-values`).textContent);
    const names = given.layout.showlegend === false ? 0 : given.data.length;
    const inRow = Math.max(1, Math.floor(chart.clientWidth / LEGEND_NAME));
    const layout = layoutOf(given.layout, Math.ceil(names / inRow));
    chart.style.height = `${layout.height}px`;
    return Plotly.react(chart, given.data, layout, { responsive: true, displaylogo: false, displayModeBar: "hover" });
  };
  const all = () => Promise.all(charts.map(draw)).then(() => document.body.setAttribute("data-drawn", String(charts.length)));
  dark.addEventListener("change", all);
  all();
})();
