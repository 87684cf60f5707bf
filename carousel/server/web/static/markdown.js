// From a model's text to markup that runs nothing and fetches nothing. HTML in it is shown as the text that it is; the
// sanitizer behind that lets through a few elements without attributes but a link's, and the policy of the page
// takes no markup that has not been through it.
import DOMPurify from "dompurify";
import { Marked } from "marked";

const MAX_CHARS = 200_000;
const LINK = /^(?:https?:\/\/|mailto:)/i;
const ALLOWED = {
  ALLOWED_TAGS: [
    ...["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "pre", "code", "em", "strong", "del"],
    ...["blockquote", "table", "thead", "tbody", "tr", "th", "td", "a"],
  ],
  ALLOWED_ATTR: ["href", "start"],
  ALLOWED_URI_REGEXP: LINK,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_TRUSTED_TYPE: true,
};

function escaped(text) {
  return text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);
}

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text),
    // A picture would be a request to another host.
    image: ({ href, text }) => escaped(`${text || "picture"} (${href})`),
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    link({ href, tokens }) {
      const text = this.parser.parseInline(tokens);
      return LINK.test(href) ? `<a href="${escaped(href)}">${text}</a>` : `${text} (${escaped(href)})`;
    },
  },
});

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer");
  }
});

/** The markup of a text; null where it is shown as it is. */
export function markup(text) {
  if (text.length > MAX_CHARS) return null;
  try {
    return DOMPurify.sanitize(marked.parse(text), ALLOWED);
  } catch {
    return null; // nested deeper than the parser goes
  }
}
