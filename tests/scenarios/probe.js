// Runs in a report's page: finds what makes it wider than the window, texts that overlap, and texts outside
// of their picture, and tells the page around it.
addEventListener("load", () => {
  const wide = [], overlaps = [], outside = [];
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) {
    wide.push(`page ${document.documentElement.scrollWidth} > ${width}`);
  }
  for (const element of document.querySelectorAll("body *")) {
    const box = element.getBoundingClientRect();
    if (box.width && box.right > width + 1) wide.push(`${element.tagName} ${element.className.baseVal ?? element.className} to ${box.right}`);
  }
  let texts = 0;
  for (const picture of document.querySelectorAll("svg")) {
    const frame = picture.getBoundingClientRect();
    if (!frame.width) continue;
    const boxes = [...picture.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]);
    texts += boxes.length;
    boxes.forEach(([name, box], index) => {
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1) {
        outside.push(name);
      }
      for (const [other, place] of boxes.slice(index + 1)) {
        // A glyph's box has empty lines above and below it; half a pixel each way is not an overlap.
        const x = Math.min(box.right, place.right) - Math.max(box.left, place.left);
        const y = Math.min(box.bottom, place.bottom) - Math.max(box.top, place.top);
        if (x > 0.5 && y > 3) overlaps.push(`${name} / ${other}`);
      }
    });
  }
  parent.postMessage(JSON.stringify({wide, overlaps, outside, texts: [String(texts)]}), "*");
});
