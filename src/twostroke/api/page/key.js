/** Return the API key that the user typed; empty if none is needed, or if the browser adds one itself. */
export const key = () => document.getElementById("key").value;
