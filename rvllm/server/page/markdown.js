// Markdown as elements. The parser's tokens are turned into nodes of a few allowed kinds; HTML in the text stays text.

import { copyButton, el } from "./dom.js";

const TAGS = new Set(["p", "ul", "ol", "li", "blockquote", "strong", "em", "s", "table", "thead", "tbody", "tr", "th", "td", "hr"]);
const HEADINGS = { h1: "h3", h2: "h4", h3: "h5", h4: "h6", h5: "h6", h6: "h6" }; // the page has the first two levels

const parser = globalThis.markdownit({ html: false, linkify: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // "setup.py" is no web site
parser.disable("image"); // nothing is fetched: an image is a link

/** Keeps the elements of a growing text: only the blocks that changed are made anew. */
export class MarkdownView {
  constructor() {
    this.node = el("div", { class: "markdown", dir: "auto" });
    this.sources = [];
  }

  update(text) {
    const blocks = topLevelBlocks(text);
    blocks.forEach(({ source, tokens }, i) => {
      if (this.sources[i] === source) return;
      const node = blockNode(tokens);
      if (i < this.node.children.length) this.node.children[i].replaceWith(node);
      else this.node.append(node);
    });
    while (this.node.children.length > blocks.length) this.node.lastElementChild.remove();
    this.sources = blocks.map((block) => block.source);
  }
}

function topLevelBlocks(text) {
  const lines = text.split("\n");
  const blocks = [];
  let tokens = [];
  for (const token of parser.parse(text, {})) {
    tokens.push(token);
    if (token.level !== 0 || token.nesting === 1) continue;
    const [start, end] = tokens[0].map;
    blocks.push({ source: `${tokens[0].type}\n${lines.slice(start, end).join("\n")}`, tokens });
    tokens = [];
  }
  return blocks;
}

function blockNode(tokens) {
  const root = el("div");
  appendTokens(root, tokens);
  return root.children.length === 1 ? root.firstElementChild : root;
}

function appendTokens(root, tokens) {
  const stack = [root];
  for (const token of tokens) {
    const parent = stack.at(-1);
    if (token.hidden) continue; // the paragraphs of a tight list
    if (token.type === "inline") appendTokens(parent, token.children);
    else if (token.nesting === -1) stack.pop();
    else {
      const node = nodeOf(token);
      parent.append(node.outer ?? node);
      if (token.nesting === 1) stack.push(node.inner ?? node);
    }
  }
}

/** The node of a token, or {outer, inner} where what follows goes into an inner one. */
function nodeOf(token) {
  switch (token.type) {
    case "softbreak": return document.createTextNode("\n");
    case "hardbreak": return el("br");
    case "code_inline": return el("code", { textContent: token.content });
    case "fence":
    case "code_block": return codeNode(token.content, token.info.trim().split(/\s+/)[0]);
    case "link_open": return linkNode(token.attrGet("href"));
    case "heading_open": return el(HEADINGS[token.tag]);
    case "table_open": {
      const inner = el("table");
      const outer = el("div", { class: "table", tabIndex: 0, role: "region", aria: { label: "Table" } }, inner);
      return { outer, inner };
    }
  }
  if (!TAGS.has(token.tag)) return document.createTextNode(token.content);
  const node = el(token.tag);
  if (token.tag === "ol" && token.attrGet("start") !== null) node.start = Number(token.attrGet("start"));
  const align = /text-align:(center|right)/.exec(token.attrGet("style") ?? "");
  if (align) node.className = align[1];
  return node;
}

function linkNode(href) {
  if (!/^(https?:\/\/|mailto:)/i.test(href)) return el("span");
  return el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" });
}

function codeNode(text, language) {
  const caption = el("figcaption", {}, el("span", { textContent: language || "text" }), copyButton(() => text, "Copy the code", true));
  const code = el("pre", { tabIndex: 0 }, el("code", { textContent: text.replace(/\n$/, "") }));
  return el("figure", { class: "code", dir: "ltr" }, caption, code);
}
