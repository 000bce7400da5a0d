// Browsers do not start workers for pages that were opened as files. There the search index is kept in a hidden frame
// instead, which answers to the same calls as a worker.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const load = (address) => `<script src="${new URL(address, location).href}"><\/script>`;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.ready = new Promise((resolve) => this.frame.addEventListener("load", resolve));
      this.frame.srcdoc = `<body><script>
        postMessage = (data) => parent.postMessage({fromFrame: true, data}, "*");
        importScripts = (...addresses) => addresses.reduce((before, address) => before.then(() => new Promise((done) => {
          const script = document.createElement("script");
          script.src = address;
          script.onload = script.onerror = done;
          document.body.append(script);
        })), Promise.resolve());
      <\/script>${load(url)}</body>`;
      window.addEventListener("message", (event) => {
        if (event.source !== this.frame.contentWindow || !event.data.fromFrame) return;
        const message = new MessageEvent("message", {data: event.data.data});
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
      document.addEventListener("DOMContentLoaded", () => document.body.append(this.frame));
      if (document.body) document.body.append(this.frame);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data})));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
