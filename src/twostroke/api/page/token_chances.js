/** Tokens coloured by how likely the model held them, and what it might have said instead. */
import { el } from "./dom.js";

const LEVELS = [0.9, 0.5, 0.2, 0.05]; // at least so likely: level 0, 1, 2, 3; below all: 4

/**
 * The tokens of a choice with their log-probabilities, whichever API it is from.
 * @param {object} choice of a chunk of a completion or of a chat
 * @returns {{token: string, logprob: ?number, top: {token: string, logprob: number}[]}[]}
 */
export function tokensOf({ logprobs }) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs: top }) => ({ token, logprob, top: top ?? [] }));
  }
  return (logprobs.tokens ?? []).map((token, i) => {
    const top = Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([other, logprob]) => ({ token: other, logprob }));
    top.sort((a, b) => b.logprob - a.logprob);
    return { token, logprob: logprobs.token_logprobs[i], top };
  });
}

/** Puts text on the page in pieces of one token, where the text is known to be of these tokens. */
export class TokenWriter {
  #pending = []; // tokens whose text has not come yet: it may be held back where a stop string might begin

  /**
   * The pieces of a text that came together with tokens.
   * @param {string} text
   * @param {ReturnType<tokensOf>} tokens
   * @returns {(Node|string)[]} which together have that text
   */
  pieces(text, tokens) {
    this.#pending.push(...tokens);
    if (text === "" || this.#pending.length === 0) return text === "" ? [] : [text];
    const pieces = [];
    let rest = text;
    while (this.#pending.length > 0) {
      const [next] = this.#pending;
      if (!rest.startsWith(next.token)) break;
      this.#pending.shift();
      rest = rest.slice(next.token.length);
      if (next.token !== "") pieces.push(piece(next.token, [next]));
    }
    // characters that several tokens spell are one piece of all of them
    if (rest !== "") pieces.push(this.#pending.length > 0 ? piece(rest, this.#pending.splice(0)) : rest);
    return pieces;
  }
}

const known = new WeakMap();

function piece(text, tokens) {
  const least = Math.min(...tokens.map(({ logprob }) => logprob ?? 0));
  const level = LEVELS.findIndex((chance) => Math.exp(least) >= chance);
  const element = el("span", { className: `token chance-${level < 0 ? LEVELS.length : level}`, tabIndex: -1 }, text);
  known.set(element, tokens);
  return element;
}

/**
 * Shows what is known of a token while a pointer or the focus is on it; arrow keys go from token to token.
 * @param {HTMLElement} answer whose tokens these are
 * @param {HTMLElement} panel where it is shown
 */
export function showChancesOf(answer, panel) {
  const show = ({ target }) => known.has(target) && panel.replaceChildren(...described(known.get(target)));
  answer.addEventListener("pointerover", show);
  answer.addEventListener("focusin", show);
  answer.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const tokens = step ? [...answer.querySelectorAll(".token")] : [];
    if (tokens.length === 0) return;
    event.preventDefault();
    const at = tokens.indexOf(document.activeElement);
    tokens[at < 0 ? 0 : Math.max(0, Math.min(tokens.length - 1, at + step))].focus();
  });
}

function described(tokens) {
  return tokens.map(({ token, logprob, top }) => {
    const others = top.map((other) =>
      el(
        "li",
        other.token === token ? { className: "taken" } : {},
        el("code", {}, visible(other.token)),
        ` ${chance(other.logprob)}`,
      ),
    );
    return el(
      "div",
      {},
      el(
        "p",
        {},
        el("code", {}, visible(token)),
        logprob === null ? "" : ` ${chance(logprob)}, log-probability ${logprob.toFixed(3)}`,
      ),
      el("ol", {}, ...others),
    );
  });
}

const chance = (logprob) => `${(100 * Math.exp(logprob)).toFixed(logprob < -5 ? 3 : 1)} %`;

/** White space as signs that can be seen. */
const visible = (token) => token.replaceAll("\n", "↵").replaceAll("\t", "→").replaceAll(" ", "·") || "(no text)";
