// The text of a page that is hard to read: an expression of JavaScript, for contrast.py.
(() => {
  const pixel = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const known = new Map();
  const rgba = color => {
    if (!known.has(color)) {
      pixel.clearRect(0, 0, 1, 1);
      pixel.fillStyle = color;
      pixel.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = pixel.getImageData(0, 0, 1, 1).data;
      known.set(color, [r, g, b, a / 255]);
    }
    return known.get(color);
  };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a)];
  const scheme = getComputedStyle(document.documentElement).colorScheme;
  const isDark = scheme.includes("dark") && matchMedia("(prefers-color-scheme: dark)").matches;
  const paper = isDark ? [18, 18, 18] : [255, 255, 255];
  const under = element => {
    if (!element) return paper;
    return over(rgba(getComputedStyle(element).backgroundColor), under(element.parentElement));
  };
  const light = color => {
    const [r, g, b] = color.map(x => x / 255).map(x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const faults = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; node = walker.nextNode();) {
    const element = node.parentElement, text = node.data.trim();
    if (!text || !element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    const style = getComputedStyle(element), size = parseFloat(style.fontSize);
    if (element.closest("[disabled], script, style, [aria-hidden=true]") || !size) continue;
    const color = rgba(element.namespaceURI.endsWith("svg") ? style.fill : style.color);
    let opacity = color[3];
    for (let e = element; e; e = e.parentElement) opacity *= +getComputedStyle(e).opacity;
    const paper = under(element);
    const lights = [light(over([...color.slice(0, 3), opacity], paper)), light(paper)];
    const ratio = (Math.max(...lights) + .05) / (Math.min(...lights) + .05);
    const isLarge = size >= 24 || size >= 18.66 && +style.fontWeight >= 700;
    if (ratio < (isLarge ? 3 : 4.5))
      faults.push({text: text.slice(0, 40), ratio: +ratio.toFixed(2), of: `${element.localName}.${element.className}`});
  }
  return faults;
})()
