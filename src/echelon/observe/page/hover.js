// The tooltip: an element shows its data-tip; a chart shows the points of its data-hover.
(() => {
  const tip = document.getElementById("tip");

  function show(event, text) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const beyond = event.clientX + 14 + box.width > innerWidth;
    tip.style.left = Math.max(4, beyond ? event.clientX - 14 - box.width : event.clientX + 14) + "px";
    tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 4)) + "px";
  }

  function nearest(points, x) {
    let low = 0;
    let high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < x) low = middle;
      else high = middle;
    }
    return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
  }

  function draw(svg, kind, attributes) {
    const element = document.createElementNS(svg.namespaceURI, kind);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    svg.append(element);
    return element;
  }

  for (const svg of document.querySelectorAll("svg[data-hover]")) {
    const curves = JSON.parse(svg.dataset.hover);
    const height = svg.viewBox.baseVal.height;
    const line = draw(svg, "line", { class: "cursor", y1: 26, y2: height - 38, visibility: "hidden" });
    const dots = curves.map((curve) =>
      draw(svg, "circle", { class: "dot " + curve.look, r: 4, visibility: "hidden" }));
    svg.addEventListener("mousemove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
      const found = curves.map((curve) => nearest(curve.points, x));
      line.setAttribute("x1", found[0][0]);
      line.setAttribute("x2", found[0][0]);
      line.setAttribute("visibility", "visible");
      found.forEach((point, index) => {
        dots[index].setAttribute("cx", point[0]);
        dots[index].setAttribute("cy", point[1]);
        dots[index].setAttribute("visibility", "visible");
      });
      const own = event.target.dataset.tip;
      show(event, (own ? own + "\n" : "") + found.map((point) => point[2]).join("\n"));
    });
    svg.addEventListener("mouseleave", () => {
      tip.hidden = true;
      for (const element of [line, ...dots]) element.setAttribute("visibility", "hidden");
    });
  }

  document.addEventListener("mousemove", (event) => {
    if (event.target.closest("svg[data-hover]")) return;
    const holder = event.target.closest("[data-tip]");
    if (holder) show(event, holder.dataset.tip);
    else tip.hidden = true;
  });

  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });
})();
