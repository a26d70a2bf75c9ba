// Every text of the page with its contrast against the ground it stands on (WCAG 2: 4.5 is enough for small text).
(() => {
  const parse = (text) => {
    const found = text.match(/[\d.]+/g).map(Number);
    const scale = text.startsWith("color(") ? 255 : 1;
    return { rgb: found.slice(0, 3).map((part) => part * scale), alpha: found[3] ?? 1 };
  };
  const over = (front, back) => front.rgb.map((part, at) => part * front.alpha + back[at] * (1 - front.alpha));
  const ground = (element) => {
    if (!element) return parse(getComputedStyle(document.documentElement).backgroundColor).rgb;
    const own = parse(getComputedStyle(element).backgroundColor);
    return own.alpha === 1 ? own.rgb : over(own, ground(element.parentElement));
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((part) => part / 255).map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data.trim()).join("");
    if (!text || ["SCRIPT", "STYLE", "NOSCRIPT", "title"].includes(element.tagName) || element.closest("noscript")) continue;
    const style = getComputedStyle(element);
    const back = ground(element);
    const front = over(parse(element instanceof SVGElement ? style.fill : style.color), back);
    const [high, low] = [light(front), light(back)].sort((a, b) => b - a);
    found.push({ text: text.slice(0, 40), ratio: (high + 0.05) / (low + 0.05) });
  }
  return found;
})()
