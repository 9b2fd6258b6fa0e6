//! Enclosing items of Rust sources, inside which anchors lie.

use std::ops::Range;

use proc_macro2::extra::DelimSpan;
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{
    Arm, Attribute, Block, Expr, Field, FieldValue, Fields, Ident, ImplItem, Item, ItemImpl, Local,
    Macro, Pat, Token, TraitItem, Type, Variant,
};

use crate::anchor::AnchorError;
use crate::rust_source::{Name, RustSource};

/// Content of an enclosing item.
#[derive(Clone)]
pub(crate) enum Body {
    Items(Vec<Item>),
    ImplItems(Vec<ImplItem>),
    TraitItems(Vec<TraitItem>),
    Variants(Vec<Variant>),
    Fields(Vec<Field>),
    Block(Block),
    Arms(Vec<Arm>),
    FieldValues(Vec<FieldValue>),
    /// Elements of an array, or arguments of a call or a macro.
    Elements(Vec<Expr>),
    /// Expression without elements of its own.
    Expr(Box<Expr>),
    /// Declaration without a body.
    Nothing,
}

/// Space between the delimiters of an enclosing item.
#[derive(Clone, Debug)]
pub(crate) struct Inside {
    pub(crate) range: Range<usize>,
    pub(crate) has_commas: bool,
}

/// Item, or part of a function, that encloses an anchor.
#[derive(Clone)]
pub(crate) struct Container {
    pub(crate) body: Body,
    /// Positions of the body, without the item's name and signature.
    pub(crate) range: Range<usize>,
    pub(crate) inside: Option<Inside>,
    /// Position of the name in the item's definition.
    pub(crate) name: Option<Range<usize>>,
}

/// Kind of an enclosing item, as its name starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Mod,
    Enum,
    Struct,
    Trait,
    Fn,
    Const,
    Static,
    Impl,
    Match,
    Arm,
    Literal,
    Call,
    Macro,
    If,
    Else,
    Let,
    Closure,
    For,
    While,
    Array,
}

const KINDS: [(&str, Kind); 20] = [
    ("mod", Kind::Mod),
    ("enum", Kind::Enum),
    ("struct", Kind::Struct),
    ("trait", Kind::Trait),
    ("fn", Kind::Fn),
    ("const", Kind::Const),
    ("static", Kind::Static),
    ("impl", Kind::Impl),
    ("match", Kind::Match),
    ("arm", Kind::Arm),
    ("literal", Kind::Literal),
    ("call", Kind::Call),
    ("macro", Kind::Macro),
    ("if", Kind::If),
    ("else", Kind::Else),
    ("let", Kind::Let),
    ("closure", Kind::Closure),
    ("for", Kind::For),
    ("while", Kind::While),
    ("array", Kind::Array),
];

/// Name of an enclosing item.
struct Segment {
    kind: Kind,
    name: Name,
    /// Name of the trait, of an item `impl TRAIT for TYPE`.
    of_trait: Option<Name>,
}

impl Segment {
    fn parse(text: &str) -> Result<Self, AnchorError> {
        let unknown = || AnchorError::Segment(text.to_owned());
        let (kind, name) = text.trim().split_once(' ').ok_or_else(unknown)?;
        let (_, kind) = KINDS
            .iter()
            .find(|(word, _)| *word == kind)
            .ok_or_else(unknown)?;
        let (of_trait, name) = match (kind, name.split_once(" for ")) {
            (Kind::Impl, Some((of_trait, name))) => (Some(Name::new(of_trait.trim())), name),
            _ => (None, name),
        };
        if name.trim().is_empty() {
            return Err(unknown());
        }
        Ok(Self {
            kind: *kind,
            name: Name::new(name.trim()),
            of_trait,
        })
    }

    /// Returns whether this is the name of an item, and not of a part of a function.
    fn is_item(&self) -> bool {
        self.kind as usize <= Kind::Impl as usize
    }
}

/// Returns all places of a source that a path of enclosing items names.
pub(crate) fn find(
    source: &RustSource<'_>,
    within: &[String],
) -> Result<Vec<Container>, AnchorError> {
    let mut containers = vec![whole_file(source)];
    for text in within {
        let segment = Segment::parse(text)?;
        let mut found: Vec<Container> = Vec::new();
        for container in &containers {
            let mut finder = Finder {
                source,
                segment: &segment,
                found: Vec::new(),
            };
            finder.search(&container.body);
            if finder.found.is_empty() && segment.kind == Kind::Array && is_array(source, container)
            {
                finder.check_array_itself(container);
            }
            for inner in finder.found {
                // Enclosing items of the same name enclose the same parts.
                if !found.iter().any(|other| other.range == inner.range) {
                    found.push(inner);
                }
            }
        }
        if found.is_empty() {
            return Err(AnchorError::NotOnce {
                what: format!("`{text}`"),
                lines: Vec::new(),
            });
        }
        containers = found;
    }
    Ok(containers)
}

/// Returns whether an enclosing item, such as a constant, is an array.
fn is_array(source: &RustSource<'_>, container: &Container) -> bool {
    let is_list = matches!(container.body, Body::Elements(_));
    is_list && source.text[..container.range.start].ends_with('[')
}

fn whole_file(source: &RustSource<'_>) -> Container {
    let range = 0..source.text.len();
    let start = match last_inner(&source.file.attrs) {
        Some(attribute) => source.range(attribute).end,
        None => source.start_of_items(),
    };
    Container {
        body: Body::Items(source.file.items.clone()),
        inside: Some(Inside {
            range: start..range.end,
            has_commas: false,
        }),
        range,
        name: None,
    }
}

fn last_inner(attributes: &[Attribute]) -> Option<&Attribute> {
    let is_inner = |attribute: &&Attribute| matches!(attribute.style, syn::AttrStyle::Inner(_));
    attributes.iter().rfind(is_inner)
}

/// Search for the enclosing items that a segment names.
struct Finder<'a> {
    source: &'a RustSource<'a>,
    segment: &'a Segment,
    found: Vec<Container>,
}

impl Finder<'_> {
    fn search(&mut self, body: &Body) {
        match (self.segment.is_item(), body) {
            // Items are named one by one, from the outermost.
            (true, Body::Items(items)) => items.iter().for_each(|item| self.check_item(item)),
            (true, Body::ImplItems(items)) => {
                items.iter().for_each(|item| self.check_impl_item(item));
            }
            (true, Body::TraitItems(items)) => {
                items.iter().for_each(|item| self.check_trait_item(item));
            }
            _ => visit_body(self, body),
        }
    }

    fn is(&self, kind: Kind, name: &Ident) -> bool {
        self.segment.kind == kind && self.segment.name.is_identifier(name)
    }

    fn mentions(&self, part: &impl syn::spanned::Spanned) -> bool {
        let range = self.source.range(part);
        self.source.mentions(&self.segment.name, &range)
    }

    fn push(
        &mut self,
        body: Body,
        delimiters: DelimSpan,
        attributes: &[Attribute],
        name: Option<&Ident>,
        has_commas: bool,
    ) {
        let open = self.source.positions(delimiters.open()).end;
        let close = self.source.positions(delimiters.close()).start;
        let start = last_inner(attributes).map_or(open, |attribute| {
            self.source.range(attribute).end.clamp(open, close)
        });
        self.found.push(Container {
            body,
            range: open..close,
            inside: Some(Inside {
                range: start..close,
                has_commas,
            }),
            name: name.map(|name| self.source.positions(name.span())),
        });
    }

    fn push_block(&mut self, block: &Block, attributes: &[Attribute], name: Option<&Ident>) {
        let body = Body::Block(block.clone());
        self.push(body, block.brace_token.span, attributes, name, false);
    }

    fn push_nothing(&mut self, name: &Ident) {
        let name = self.source.positions(name.span());
        self.found.push(Container {
            body: Body::Nothing,
            range: name.end..name.end,
            inside: None,
            name: Some(name),
        });
    }

    fn push_fields(&mut self, fields: &Fields, name: &Ident) {
        match fields {
            Fields::Named(fields) => {
                let body = Body::Fields(fields.named.iter().cloned().collect());
                self.push(body, fields.brace_token.span, &[], Some(name), true);
            }
            Fields::Unnamed(fields) => {
                let body = Body::Fields(fields.unnamed.iter().cloned().collect());
                self.push(body, fields.paren_token.span, &[], Some(name), true);
            }
            Fields::Unit => self.push_nothing(name),
        }
    }

    /// Adds an expression. Its elements are those of the block, list or literal that it consists of.
    fn push_expr(&mut self, expr: &Expr, name: Option<&Ident>) {
        let before = self.found.len();
        match expr {
            Expr::Reference(inner) => self.push_expr(&inner.expr, name),
            Expr::Paren(inner) => self.push_expr(&inner.expr, name),
            Expr::Group(inner) => self.push_expr(&inner.expr, name),
            Expr::Try(inner) => self.push_expr(&inner.expr, name),
            Expr::Closure(inner) => self.push_expr(&inner.body, name),
            Expr::Block(block) => self.push_block(&block.block, &block.attrs, name),
            Expr::Unsafe(block) => self.push_block(&block.block, &block.attrs, name),
            Expr::Async(block) => self.push_block(&block.block, &block.attrs, name),
            Expr::Loop(block) => self.push_block(&block.body, &block.attrs, name),
            Expr::ForLoop(block) => self.push_block(&block.body, &block.attrs, name),
            Expr::While(block) => self.push_block(&block.body, &block.attrs, name),
            Expr::Match(expr) => self.push(
                Body::Arms(expr.arms.clone()),
                expr.brace_token.span,
                &expr.attrs,
                name,
                expr.arms.last().is_some_and(has_comma),
            ),
            Expr::Struct(literal) => self.push_literal(literal, name),
            Expr::Array(array) => {
                let body = Body::Elements(array.elems.iter().cloned().collect());
                self.push(body, array.bracket_token.span, &[], name, true);
            }
            Expr::Macro(expr) => self.push_macro(&expr.mac, name),
            _ => {}
        }
        if self.found.len() == before {
            self.found.push(Container {
                body: Body::Expr(Box::new(expr.clone())),
                range: self.source.range(expr),
                inside: None,
                name: name.map(|name| self.source.positions(name.span())),
            });
        }
    }

    fn push_literal(&mut self, literal: &syn::ExprStruct, name: Option<&Ident>) {
        let body = Body::FieldValues(literal.fields.iter().cloned().collect());
        self.push(body, literal.brace_token.span, &[], name, true);
        if let (Some(rest), Some(container)) = (&literal.dot2_token, self.found.last_mut())
            && let Some(inside) = &mut container.inside
        {
            // Fields end in front of `..`.
            inside.range.end = self.source.range(rest).start;
        }
    }

    /// Adds the arguments of a macro, if they are a list of expressions.
    fn push_macro(&mut self, invocation: &Macro, name: Option<&Ident>) {
        if let Some(arguments) = arguments(invocation) {
            let delimiters = match &invocation.delimiter {
                syn::MacroDelimiter::Paren(token) => token.span,
                syn::MacroDelimiter::Brace(token) => token.span,
                syn::MacroDelimiter::Bracket(token) => token.span,
            };
            self.push(Body::Elements(arguments), delimiters, &[], name, true);
        }
    }

    fn check_item(&mut self, item: &Item) {
        match item {
            Item::Mod(item) if self.is(Kind::Mod, &item.ident) => match &item.content {
                Some((braces, items)) => {
                    let body = Body::Items(items.clone());
                    self.push(body, braces.span, &item.attrs, Some(&item.ident), false);
                }
                None => self.push_nothing(&item.ident),
            },
            Item::Enum(item) if self.is(Kind::Enum, &item.ident) => {
                let body = Body::Variants(item.variants.iter().cloned().collect());
                self.push(body, item.brace_token.span, &[], Some(&item.ident), true);
            }
            Item::Struct(item) if self.is(Kind::Struct, &item.ident) => {
                self.push_fields(&item.fields, &item.ident);
            }
            Item::Trait(item) if self.is(Kind::Trait, &item.ident) => {
                let body = Body::TraitItems(item.items.clone());
                let span = item.brace_token.span;
                self.push(body, span, &item.attrs, Some(&item.ident), false);
            }
            Item::Fn(item) if self.is(Kind::Fn, &item.sig.ident) => {
                self.push_block(&item.block, &item.attrs, Some(&item.sig.ident));
            }
            Item::Const(item) if self.is(Kind::Const, &item.ident) => {
                self.push_expr(&item.expr, Some(&item.ident));
            }
            Item::Static(item) if self.is(Kind::Static, &item.ident) => {
                self.push_expr(&item.expr, Some(&item.ident));
            }
            Item::Impl(item) if self.is_impl(item) => {
                let body = Body::ImplItems(item.items.clone());
                self.push(body, item.brace_token.span, &item.attrs, None, false);
            }
            _ => {}
        }
    }

    fn is_impl(&self, item: &ItemImpl) -> bool {
        let has_trait = match (&self.segment.of_trait, &item.trait_) {
            (Some(name), Some((path, _))) => name.is_end_of(path),
            (None, None) => true,
            _ => false,
        };
        let mut of = &*item.self_ty;
        while let Type::Reference(reference) = of {
            of = &reference.elem;
        }
        let has_type = match of {
            Type::Path(of) => self.segment.name.is_end_of(&of.path),
            _ => false,
        };
        self.segment.kind == Kind::Impl && has_trait && has_type
    }

    fn check_impl_item(&mut self, item: &ImplItem) {
        match item {
            ImplItem::Fn(item) if self.is(Kind::Fn, &item.sig.ident) => {
                self.push_block(&item.block, &item.attrs, Some(&item.sig.ident));
            }
            ImplItem::Const(item) if self.is(Kind::Const, &item.ident) => {
                self.push_expr(&item.expr, Some(&item.ident));
            }
            _ => {}
        }
    }

    fn check_trait_item(&mut self, item: &TraitItem) {
        match item {
            TraitItem::Fn(item) if self.is(Kind::Fn, &item.sig.ident) => match &item.default {
                Some(block) => self.push_block(block, &item.attrs, Some(&item.sig.ident)),
                None => self.push_nothing(&item.sig.ident),
            },
            TraitItem::Const(item) if self.is(Kind::Const, &item.ident) => match &item.default {
                Some((_, expr)) => self.push_expr(expr, Some(&item.ident)),
                None => self.push_nothing(&item.ident),
            },
            _ => {}
        }
    }

    /// Adds the arguments of a call, or the closures among them.
    fn check_call(&mut self, arguments: &Punctuated<Expr, Token![,]>, parentheses: DelimSpan) {
        match self.segment.kind {
            Kind::Call => {
                let body = Body::Elements(arguments.iter().cloned().collect());
                self.push(body, parentheses, &[], None, true);
            }
            Kind::Closure => {
                for argument in arguments {
                    if let Expr::Closure(closure) = argument {
                        self.push_expr(&closure.body, None);
                    }
                }
            }
            _ => {}
        }
    }

    fn is_of_call(&self) -> bool {
        matches!(self.segment.kind, Kind::Call | Kind::Closure)
    }

    fn check_array_itself(&mut self, container: &Container) {
        if self.source.mentions(&self.segment.name, &container.range) {
            self.found.push(container.clone());
        }
    }

    /// Adds an array, unless an array inside of it mentions the name too.
    fn check_array(&mut self, elements: &[Expr], push: impl FnOnce(&mut Self)) {
        let before = self.found.len();
        elements.iter().for_each(|element| self.visit_expr(element));
        let mentions = |element| self.mentions(element);
        if self.segment.kind == Kind::Array
            && self.found.len() == before
            && elements.iter().any(mentions)
        {
            push(self);
        }
    }
}

impl Visit<'_> for Finder<'_> {
    fn visit_item(&mut self, item: &Item) {
        if self.segment.is_item() {
            self.check_item(item);
        }
        visit::visit_item(self, item);
    }

    fn visit_expr_match(&mut self, expr: &syn::ExprMatch) {
        if self.segment.kind == Kind::Match && self.mentions(&expr.expr) {
            self.push_expr(&Expr::Match(expr.clone()), None);
        }
        visit::visit_expr_match(self, expr);
    }

    fn visit_arm(&mut self, arm: &Arm) {
        if self.segment.kind == Kind::Arm && self.mentions(&arm.pat) {
            self.push_expr(&arm.body, None);
        }
        visit::visit_arm(self, arm);
    }

    fn visit_expr_struct(&mut self, literal: &syn::ExprStruct) {
        if self.segment.kind == Kind::Literal && self.segment.name.is_end_of(&literal.path) {
            self.push_literal(literal, None);
        }
        visit::visit_expr_struct(self, literal);
    }

    fn visit_expr_call(&mut self, call: &syn::ExprCall) {
        let is_named = match &*call.func {
            Expr::Path(path) => self.segment.name.is_end_of(&path.path),
            _ => false,
        };
        if is_named && self.is_of_call() {
            self.check_call(&call.args, call.paren_token.span);
        }
        visit::visit_expr_call(self, call);
    }

    fn visit_expr_method_call(&mut self, call: &syn::ExprMethodCall) {
        if self.is_of_call() {
            let receiver = self.source.range(&call.receiver);
            let method = self.source.positions(call.method.span());
            let callee = receiver.start..method.end;
            if self.source.ends_with(&self.segment.name, &callee) {
                self.check_call(&call.args, call.paren_token.span);
            }
        }
        visit::visit_expr_method_call(self, call);
    }

    fn visit_expr_if(&mut self, expr: &syn::ExprIf) {
        if matches!(self.segment.kind, Kind::If | Kind::Else) && self.mentions(&expr.cond) {
            match (self.segment.kind, &expr.else_branch) {
                (Kind::If, _) => self.push_block(&expr.then_branch, &[], None),
                (_, Some((_, branch))) => {
                    if let Expr::Block(branch) = &**branch {
                        self.push_block(&branch.block, &[], None);
                    }
                }
                _ => {}
            }
        }
        visit::visit_expr_if(self, expr);
    }

    fn visit_local(&mut self, local: &Local) {
        if self.segment.kind == Kind::Let
            && let Some(init) = &local.init
        {
            let pattern = match &local.pat {
                Pat::Type(typed) => &typed.pat,
                pattern => pattern,
            };
            if self.mentions(pattern) {
                self.push_expr(&init.expr, None);
            }
        }
        visit::visit_local(self, local);
    }

    fn visit_expr_for_loop(&mut self, expr: &syn::ExprForLoop) {
        if self.segment.kind == Kind::For && (self.mentions(&expr.pat) || self.mentions(&expr.expr))
        {
            self.push_block(&expr.body, &expr.attrs, None);
        }
        visit::visit_expr_for_loop(self, expr);
    }

    fn visit_expr_while(&mut self, expr: &syn::ExprWhile) {
        if self.segment.kind == Kind::While && self.mentions(&expr.cond) {
            self.push_block(&expr.body, &expr.attrs, None);
        }
        visit::visit_expr_while(self, expr);
    }

    fn visit_expr_array(&mut self, array: &syn::ExprArray) {
        let elements: Vec<_> = array.elems.iter().cloned().collect();
        self.check_array(&elements, |finder| {
            finder.push_expr(&Expr::Array(array.clone()), None);
        });
    }

    fn visit_macro(&mut self, invocation: &Macro) {
        let Some(elements) = arguments(invocation) else {
            return;
        };
        if self.segment.kind == Kind::Macro && self.segment.name.is_end_of(&invocation.path) {
            self.push_macro(invocation, None);
        }
        match invocation.path.is_ident("vec") {
            true => self.check_array(&elements, |finder| finder.push_macro(invocation, None)),
            false => elements.iter().for_each(|element| self.visit_expr(element)),
        }
    }
}

/// Returns whether a match arm ends with a comma, or needs one in front of another arm.
pub(crate) fn has_comma(arm: &Arm) -> bool {
    let is_block = matches!(
        *arm.body,
        Expr::Block(_)
            | Expr::Unsafe(_)
            | Expr::If(_)
            | Expr::Match(_)
            | Expr::Loop(_)
            | Expr::ForLoop(_)
            | Expr::While(_)
    );
    arm.comma.is_some() || !is_block
}

/// Returns the arguments of a macro, if they are a list of expressions.
fn arguments(invocation: &Macro) -> Option<Vec<Expr>> {
    let parser = Punctuated::<Expr, Token![,]>::parse_terminated;
    let arguments = invocation.parse_body_with(parser).ok()?;
    Some(arguments.into_iter().collect())
}

/// Visits the elements of an enclosing item.
pub(crate) fn visit_body(visitor: &mut impl for<'a> Visit<'a>, body: &Body) {
    match body {
        Body::Items(items) => items.iter().for_each(|item| visitor.visit_item(item)),
        Body::ImplItems(items) => items.iter().for_each(|item| visitor.visit_impl_item(item)),
        Body::TraitItems(items) => items.iter().for_each(|item| visitor.visit_trait_item(item)),
        Body::Variants(variants) => variants.iter().for_each(|item| visitor.visit_variant(item)),
        Body::Fields(fields) => fields.iter().for_each(|field| visitor.visit_field(field)),
        Body::Block(block) => visitor.visit_block(block),
        Body::Arms(arms) => arms.iter().for_each(|arm| visitor.visit_arm(arm)),
        Body::FieldValues(values) => values
            .iter()
            .for_each(|value| visitor.visit_field_value(value)),
        Body::Elements(elements) => elements
            .iter()
            .for_each(|element| visitor.visit_expr(element)),
        Body::Expr(expr) => visitor.visit_expr(expr),
        Body::Nothing => {}
    }
}
