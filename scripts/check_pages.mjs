// Checks HTML pages in Chromium, at 400 and 1400 pixels, light and dark: axe-core's serious and critical faults, text that
// overlaps other text of its chart or is cut at the window's side, and loads from outside the file.
//
//   PAGES_MODULES=DIR/node_modules node scripts/check_pages.mjs PAGE.html ...
//
// PAGES_MODULES holds playwright-core and axe-core; PAGES_BROWSER is Chromium's path (/usr/bin/chromium by default).
import { createRequire } from "node:module";
import path from "node:path";
import { pathToFileURL } from "node:url";

const require = createRequire(path.join(path.resolve(process.env.PAGES_MODULES ?? "node_modules"), "pages.cjs"));
const { chromium } = require("playwright-core");
const axe = require.resolve("axe-core/axe.min.js");
const browser = await chromium.launch({
  executablePath: process.env.PAGES_BROWSER ?? "/usr/bin/chromium",
  args: ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync"],
});

// In the page: texts of a chart that overlap, and what is wider than the window and cannot be scrolled to.
function layoutFaults() {
  const faults = [];
  for (const svg of document.querySelectorAll("svg")) {
    const boxes = [...svg.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
    const card = (svg.closest("figure") ?? svg).getBoundingClientRect();
    boxes.forEach(([words, box], number) => {
      if (!box.width) return; // folded
      if (box.left < card.left - 1 || box.right > card.right + 1) faults.push(`cut: ${words}`);
      for (const [other, rival] of boxes.slice(number + 1)) {
        const across = Math.min(box.right, rival.right) - Math.max(box.left, rival.left);
        const down = Math.min(box.bottom, rival.bottom) - Math.max(box.top, rival.top);
        if (across > 1 && down > 3) faults.push(`overlap: ${words} / ${other}`);
      }
    });
  }
  const wide = document.documentElement.scrollWidth - window.innerWidth;
  return wide > 0 ? [...faults, `${wide} pixels wider than the window`] : faults;
}

let faults = 0;
for (const file of process.argv.slice(2)) {
  for (const width of [400, 1400]) {
    for (const colorScheme of ["light", "dark"]) {
      // The page's own policy allows no script; axe needs one.
      const context = await browser.newContext({ viewport: { width, height: 1000 }, colorScheme, bypassCSP: true });
      const page = await context.newPage();
      const requests = [];
      page.on("request", (request) => requests.push(request.url()));
      const address = pathToFileURL(path.resolve(file)).href;
      await page.goto(address);
      await page.evaluate(() => document.querySelectorAll("details").forEach((one) => { one.open = true; }));
      await page.addScriptTag({ path: axe });
      // A chart is one picture to axe: its hundreds of parts would take minutes. Its texts are measured below.
      const { violations } = await page.evaluate(() => window.axe.run({ exclude: [["svg > *"]] }, { resultTypes: ["violations"] }));
      const grave = violations.filter((one) => ["serious", "critical"].includes(one.impact));
      const found = [
        ...grave.map((one) => `${one.impact} ${one.id}: ${one.nodes.length} times, such as ${one.nodes[0].html.slice(0, 160)}`),
        ...(await page.evaluate(layoutFaults)),
        ...requests.filter((url) => url !== address).map((url) => `loads ${url}`),
      ];
      faults += found.length;
      found.forEach((one) => console.log(`${file} at ${width}, ${colorScheme}: ${one}`));
      await context.close();
    }
  }
}
await browser.close();
console.log(`${process.argv.length - 2} pages, ${faults} faults`);
process.exit(faults ? 1 : 0);
