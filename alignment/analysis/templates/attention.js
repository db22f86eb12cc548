"use strict";
for (const maps of document.querySelectorAll(".maps")) {
  const large = maps.querySelector(".large img"), name = maps.querySelector(".name"), told = maps.querySelector("output");
  const rows = [...maps.querySelectorAll(".rows li")], columns = [...maps.querySelectorAll(".columns li")];
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

  const choose = (button) => {
    for (const other of maps.querySelectorAll("button")) other.setAttribute("aria-pressed", other === button);
    large.src = button.querySelector("img").src;
    name.textContent = button.title;
    told.textContent = "";
  };
  for (const button of maps.querySelectorAll("button")) button.addEventListener("click", () => choose(button));

  large.addEventListener("load", () => draw());
  const draw = () => {
    canvas.canvas.width = large.naturalWidth;
    canvas.canvas.height = large.naturalHeight;
    canvas.drawImage(large, 0, 0);
  };
  if (large.complete) draw();

  large.addEventListener("mousemove", (event) => {
    const column = Math.min(columns.length - 1, Math.floor((event.offsetX / large.clientWidth) * columns.length));
    const row = Math.min(rows.length - 1, Math.floor((event.offsetY / large.clientHeight) * rows.length));
    if (row < 0 || column < 0) return;
    const shade = 255 - canvas.getImageData(column, row, 1, 1).data[0];
    told.textContent = `${rows[row].title} \u2192 ${columns[column].title}: ${((shade / 255) ** 2).toFixed(3)}`;
  });
  large.addEventListener("mouseleave", () => { told.textContent = ""; });
}
