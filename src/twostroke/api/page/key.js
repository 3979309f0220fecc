/** The key that the page's user has typed; empty where none is needed, or where the browser sends one by itself. */
export const key = () => document.getElementById("key").value;
